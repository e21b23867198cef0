"""The entry for users: load a target with or without a drafter, and decode."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.drafting.drafter import Drafter, NoDrafter
from drafthead.core.errors import UserError
from drafthead.core.target.int8 import forget_rounded
from drafthead.core.target.processor import end_helpers
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer.answers.emissions import in_time, result_of, streamed
from drafthead.infer.answers.results import DecodeResult, Stream, TextStream
from drafthead.infer.chat_session import ChatSession, Message
from drafthead.infer.custom_generate import CustomGenerate
from drafthead.infer.drafters.lookup import Lookup, PromptLookup
from drafthead.infer.drafters.store_lookup import LEAST_NGRAM
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.loading.loaded import (
    Draft,
    Fitting,
    described,
    length_of_paths,
    loaded_target,
    made_drafter,
    prepared_target,
    read_drafts,
)
from drafthead.infer.planning.planner import FixedPlan, Planner
from drafthead.infer.request.options import read_options, refuse_in_pieces
from drafthead.infer.request.other_words import type_of_weights
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.request import DecodeOptions, Request
from drafthead.infer.request.text_pieces import text_pieces
from drafthead.infer.scheduling.method import Method, planner_of, rule_of
from drafthead.infer.scheduling.past import Memory
from drafthead.infer.scheduling.request_of import endless_request, request_of, single
from drafthead.infer.scheduling.running_rows import RunningRows, serve
from drafthead.infer.serving import (
    Answer,
    Requests,
    ServeRequest,
    WaitingRequests,
    own_options,
    refuse_in_serve,
    refuse_of_one_call,
    shared_options,
)
from drafthead.infer.timing.plans import Plans, StepKind
from drafthead.infer.timing.step_timing import PROMPT_TOKENS, VISIT_STEPS, time_or_visit
from drafthead.infer.verifiers import Verifier, verifier_for

logger = logging.getLogger(__name__)
FORM_DEPTH = 31  # tokens that a form drafts, at most, where nothing else does
KNOW_FORMS = Lookup, WithLookup  # drafters that draft what a form demands


class Decoder:
    """A target and the drafter that proposes tokens for it.

    Several threads may decode at once, with one decoder or with several over one model: each pass
    over the model belongs to its caller.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        budget: Budget | None = None,
        adaptive: bool = False,
        draft_temperature: float | None = None,
    ):
        """Decode with `drafter`, or plainly without one.

        `budget` limits the tree of each step; by default it is the largest that the drafter uses.
        With `adaptive` the planner chooses it step by step instead, by what steps have taken and by
        what was accepted, and decodes plainly while no tree pays. `draft_temperature` is the
        temperature at which children are drawn, by default the target's. It changes how many are
        accepted and not the output's distribution. Raises UserError when it is not above 0.
        """
        self.target, self.drafter = target, drafter
        self.budget = budget or (drafter.budgets[-1] if drafter is not None else None)
        self.adaptive = adaptive
        if draft_temperature is not None and not draft_temperature > 0:
            raise UserError(f"draft_temperature must be above 0, got {draft_temperature}")
        self.draft_temperature = draft_temperature
        self.plans = Plans(target, drafter) if adaptive and drafter is not None else None
        self.tokenizer = target.tokenizer
        self.max_length = target.max_length
        self.end_ids = target.end_ids
        self.memory = Memory(target.model)
        if target.device.type == "cuda":
            # torch prefers cuDNN's attention where there is a mask, which makes a plan for each
            # number of columns: 45 ms a step that is not recorded.
            torch.backends.cuda.enable_cudnn_sdp(False)
            # Sums of products over parts of a row are added in float32, as for one row: fewer near
            # ties fall another way in a tree.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel | Target,
        draft: Draft | Sequence[Draft] | None = None,
        tree_nodes: int | None = None,
        draft_tokens: int | None = None,
        draft_temperature: float | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        trust_remote_code: bool = False,
        compile: bool | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        same_bits: bool = False,
        **others: Any,
    ) -> "Decoder":
        """Load a target and a drafter.

        `target` is a folder, a GGUF file, a hub id, a loaded model or a `Target`. A loaded model
        keeps its mode, hooks and `requires_grad`; pass its `tokenizer`, or the name of one, to work
        with text.

        `draft` names the drafter. It is the path or hub name of a head or a draft model
        (`head:PATH` and `model:PATH` state which), ``layers:0-7,20-29`` for some of the target's
        own layers (``layers:0-9`` exits after ten), `mtp` for its MTP layer, a `Drafter`, or None
        for plain decoding. Lookup drafts copy earlier text, alone or in a list with one of these:
        `lookup` copies from the prompt and the answer, `ngrams:FOLDER` also uses a table of
        `drafthead data index`, and `answers` also uses the last 200,000 tokens that this decoder
        has read and written.

        `tree_nodes` fixes the size of trees, root included. By default their size follows measured
        costs and acceptance while decoding. `draft_tokens` limits the drafts of draft models, own
        layers and lookup; the default is 4. `draft_temperature` is the temperature at which drafts
        are sampled; it changes the speed only.

        `compile` is for GPUs: it compiles the model's layers, which takes minutes the first time,
        and keeps the code on disk. On a CPU it changes nothing, and a warning says so. By default
        nothing is compiled: a GPU uses CUDA graphs, and a CPU runs passes and drafts by our kernels
        in bfloat16. False runs the model as it is written. `same_bits` makes 16-bit text identical
        to plain decoding without our kernels, by padding every pass to 16 tokens, which is slower.

        Code that comes with a model runs only with `trust_remote_code`. `others` accepts
        transformers' `torch_dtype`. Raises UserError for what cannot be loaded, does not fit the
        target, or is called differently here.
        """
        drafts = read_drafts(draft)
        length = length_of_paths(draft_tokens, drafts)
        dtype = type_of_weights(dtype, others)
        loaded = loaded_target(target, dtype, str(device), trust_remote_code, tokenizer)
        drafter = made_drafter(drafts, Fitting(loaded, length, dtype, trust_remote_code))
        end_helpers()  # another thread may decode
        return decoder_for(loaded, drafter, tree_nodes, compile, draft_temperature, same_bits)

    def with_drafts(self, draft: Draft | Sequence[Draft] | None) -> "Decoder":
        """A decoder of this target, prepared as it is, with other drafts, in planned sizes.

        Raises UserError as `from_pretrained` for what cannot draft.
        """
        target = self.target
        drafter = made_drafter(read_drafts(draft), Fitting(target))
        if drafter is None:
            return Decoder(target)
        if target.backend.records or target.backend.has_kernels:
            drafter.compile(target)
        end_helpers()  # another thread may decode
        return Decoder(target, drafter, None, True, self.draft_temperature)

    def __repr__(self) -> str:
        return f"Decoder({described(self.target, self.drafter)})"

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | None = None, **options: Any
    ) -> DecodeResult:
        """Decode one prompt or a batch. `DecodeOptions` documents the options.

        A prompt is a string (a user message if the tokenizer has a chat template), chat messages,
        token ids (a list, tensor or array [T]), or a tokenizer's output. A batch is a list of
        prompts, or padded ids [B, T] with their `attention_mask`. Without a mask, pad tokens at
        both ends of rows [B, T] are dropped, as in transformers. A tokenizer's output may also be
        passed by name: `generate(**inputs)`. Raises UserError for a request that is not supported,
        and for an unknown option, with the right name.
        """
        run, emissions = self._start(self.request(prompts, read_options(options)))
        if (streamer := run.request.streamer) is not None:
            emissions = streamed(emissions, run.request, streamer)
        for _ in emissions:
            pass
        return self.result(run)

    def stream(self, prompt: Prompt | None = None, **options: Any) -> TextStream:
        """Decode one prompt and return its text piece by piece.

        Joined, the pieces are the text that `generate` returns.
        """
        if self.tokenizer is None:
            raise UserError("the target has no tokenizer to turn tokens into text with")
        run, emissions = self._in_pieces(prompt, options)
        if len(run.request.prompts) > 1:
            raise UserError("stream takes one prompt; use generate or steps for a batch")
        [before] = run.request.prefixes or run.request.prompts
        pieces = text_pieces((emitted[0] for emitted in emissions), self.tokenizer, before)
        return Stream(pieces, run.stats, lambda: self.result(run))

    def steps(
        self, prompts: Prompt | Sequence[Prompt] | None = None, **options: Any
    ) -> Stream[Emitted]:
        """Decode like `generate`, one pass per iteration.

        Each pass returns {row number: new tokens} for rows that got new tokens. You can alternate
        between several decodings.
        """
        run, emissions = self._in_pieces(prompts, options)
        return Stream(emissions, run.stats, lambda: self.result(run))

    def as_custom_generate(self) -> CustomGenerate:
        """Return the `custom_generate` argument for `model.generate` of this decoder's model.

        `model.generate` then decodes with this decoder and returns what it always returns.
        """
        self.target.refuse_encoder("custom_generate")

        def begin(request: Request) -> tuple[BatchRun, Iterator[Emitted]]:
            return self._start(replace(request, draft_temperature=self.draft_temperature))

        return CustomGenerate(self.target, begin)

    def result(self, run: BatchRun) -> DecodeResult:
        """Return what a run has decoded so far; another thread may still be decoding it."""
        return result_of(run, self.tokenizer)

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        fresh: bool = False,
        **options: Any,
    ) -> None:
        """Measure step times and make graphs before the first answer.

        This is done for each batch size, with the same options as later answers. It takes 2 to 10
        seconds per size, longer if steps are slow. The times are kept; `fresh` measures them again.
        Raises what `generate` raises.
        """
        settings = read_options(options)
        refuse_in_pieces(settings)
        if self.target.backend.records:  # the last row of a batch has recordings of its own
            batch_sizes = list(dict.fromkeys([*batch_sizes, 1]))
        for rows in batch_sizes:
            if len(batch_sizes) > 1:
                logger.info("warming up for %d prompts at a time", rows)
            request = endless_request(self.target, settings, rows, PROMPT_TOKENS)
            request = replace(request, draft_temperature=self.draft_temperature)
            self._warm_up(BatchRun(request, self.target.device), fresh)
        end_helpers()  # another thread may decode

    def _warm_up(self, run: BatchRun, fresh: bool) -> None:
        """Time the steps of a batch, or make a few of every kind."""
        rule, plans = self.rule(run.request), self.plans
        if plans is None or not rule.follows or self.target.is_shared:
            for _ in islice(self.method(run).decoding(run), VISIT_STEPS):
                pass
            return
        time_or_visit(plans, run, rule, fresh)

    def serve(self, requests: Requests, *, max_rows: int = 8, **options: Any) -> Iterator[Answer]:
        """Answer a stream of requests with continuous batching, up to `max_rows` at a time.

        `requests` is an iterable, which may be endless, of prompts or `ServeRequest`s, or a
        `queue.Queue` of them; None in the queue ends it. The next request is taken as soon as a row
        is free; with 32 rows or more, as soon as a sixteenth of them is free, because reading few
        prompts at a time is slow. Answers are returned in the order in which they end. Each equals
        that of `generate` for its prompt and seed alone; by default seeds count up from `seed`. A
        request that is not supported gets an answer with an `error`, and does not affect the
        others.

        The options are those of `generate` that requests of one batch can share; a `ServeRequest`
        may have its own. Raises UserError for other options by name, and for a max_rows below 1.
        """
        seed = shared_options(options, max_rows)

        def read(request: ServeRequest, number: int) -> Request:
            settings = read_options({**options, **own_options(request, seed + number)})
            refuse_in_serve(request.options, settings)
            return single(self.request(request.prompt, settings))

        return serve(WaitingRequests(requests, read), self.running_rows(max_rows), self.tokenizer)

    def running_rows(self, max_rows: int) -> RunningRows:
        """Rows for requests that come and go, up to `max_rows` of them; none is at work yet."""
        return RunningRows(self.method, self.rule, self.target, max_rows, self.memory)

    def remember(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Read a shared prefix, such as a system prompt, once for all later prompts.

        Afterwards, `generate`, `stream`, `steps`, `serve` and `chat` skip the tokens that all
        prompts of a batch share with a remembered prompt (the longest of several). Answers stay the
        same in float32; `stats.reused` counts the skipped positions. A remembered prompt keeps its
        part of the caches until `forget`, and is ignored while the model has other weights or
        adapters. Raises UserError for anything that is not one prompt of `generate`.
        """
        self.target.refuse_encoder("remember")  # the encoder reads a text as a whole
        options = {"max_new_tokens": 1, "use_model_defaults": False}
        settings = read_options({**options, "chat_template_kwargs": chat_template_kwargs})
        run = BatchRun(single(self.request(prompt, settings)), self.target.device)
        if run.request.prompts[0] not in [past.tokens for past in self.memory.known()]:
            method, state = self.method(run), self.memory.state()
            self.memory.add(method.read(run, method.recall(run)), state)

    def forget(self) -> None:
        """Forget all remembered prompts, and what was made of int8 weights; free their memory."""
        self.memory.pasts.clear()
        self.memory.kept.clear()
        forget_rounded(self.target.model)

    def chat(self, system: str | None = None, **options: Any) -> ChatSession:
        """Start a conversation that keeps the caches of earlier turns, with the options of
        `generate`.

        Raises UserError when the target has no tokenizer with a chat template.
        """
        self.target.refuse_encoder("chat")
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise UserError("chat needs a tokenizer with a chat template")
        settings = read_options(options)
        refuse_of_one_call(
            options, settings, "chat does not take {}: each of its turns is one answer"
        )

        def begin(messages: Sequence[Message]) -> tuple[BatchRun, Method]:
            run = BatchRun(single(self.request(messages, settings)), self.target.device)
            return run, self.method(run)

        messages = [] if system is None else [{"role": "system", "content": system}]
        return ChatSession(begin, self.result, self.tokenizer, messages)

    def _in_pieces(
        self, prompts: Any, options: Mapping[str, Any]
    ) -> tuple[BatchRun, Iterator[Emitted]]:
        """`_start` for a caller who gets tokens in pieces."""
        settings = read_options(options)
        refuse_in_pieces(settings)
        return self._start(self.request(prompts, settings))

    def _start(self, request: Request) -> tuple[BatchRun, Iterator[Emitted]]:
        """The batch of a request, and what its passes emit, for as long as there is time."""
        run = BatchRun(request, self.target.device)
        return run, in_time(self.method(run).decoding(run), run)

    def request(self, prompts: Any, options: DecodeOptions) -> Request:
        """The request in token ids and limits; raises UserError for what cannot be decoded."""
        return request_of(self.target, prompts, options, self.end_ids, self.draft_temperature)

    def rule(self, request: Request) -> Verifier:
        """The acceptance rule that a request names."""
        return rule_of(request, self.target, self.drafter)

    def method(self, run: BatchRun) -> Method:
        """The method of this batch; checks the verifier's name even where none is needed."""
        rule = self.rule(run.request)
        request, own = run.request, self.drafter
        is_free = own is None or (self.adaptive and not isinstance(own, KNOW_FORMS))
        if is_free and request.in_form and request.beams is None:
            return self.in_form.method(run)
        planner = planner_of(run, self.target, self._planner(run, rule))
        drafter: Drafter = NoDrafter()
        if isinstance(planner, FixedPlan) and planner.budget is None:  # nothing is ever proposed
            rule = verifier_for("auto", run.request.sampling.temperature)
        elif self.drafter is not None:
            drafter = self.drafter
        budgets = [*drafter.budgets, *([self.budget] if self.budget else [])]
        most = max([budget.nodes for budget in budgets], default=1)
        return Method(self.target, drafter, rule, planner, most, self.memory)

    @cached_property
    def in_form(self) -> "Decoder":
        """The decoder of answers in a form, with lookup, where the drafter alone knows no form."""
        lookup = PromptLookup(FORM_DEPTH, LEAST_NGRAM)
        drafter = lookup if self.drafter is None else WithLookup(self.drafter)
        decoder = Decoder(self.target, drafter, None, True, self.draft_temperature)
        decoder.memory = self.memory  # of which it uses what its own drafter has read
        return decoder

    def _planner(self, run: BatchRun, rule: Verifier) -> Planner:
        """The planner that chooses the budget of each step."""
        if self.plans is None:
            return FixedPlan(self.budget)
        if not rule.follows:
            # The text of a seed depends on the tree, which must not depend on a clock, on other
            # rows or on earlier answers.
            return FixedPlan(self.plans.fixed_budget)
        return self.plans.planner(StepKind.of(run, rule), run.sampling.temperature)


def decoder_for(
    target: Target,
    drafter: Drafter | None,
    tree_nodes: int | None,
    compile: bool | None,
    draft_temperature: float | None = None,
    same_bits: bool = False,
) -> Decoder:
    """A decoder with trees of `tree_nodes` nodes, or of planned sizes for None.

    `compile` and `same_bits` as for `Decoder.from_pretrained`. Raises UserError for settings of a
    drafter without one, and for `compile` and `same_bits` where the target cannot be compiled or
    cannot keep that promise.
    """
    is_new = not target.backend.records
    target = prepared_target(target, compile, same_bits)
    if drafter is None:
        for name, value in (("tree_nodes", tree_nodes), ("draft_temperature", draft_temperature)):
            if value is not None:
                raise UserError(f"{name}={value} needs a head, a draft model, own layers or lookup")
        return Decoder(target)
    backend = target.backend
    if (backend.records or backend.has_kernels) and (compile or (compile is None and is_new)):
        drafter.compile(target)
    budget = None if tree_nodes is None else drafter.budgets[-1].of_nodes(tree_nodes)
    return Decoder(target, drafter, budget, tree_nodes is None, draft_temperature)
