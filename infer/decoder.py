"""The entry for users: load a target with or without a drafter, and decode."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.drafting.drafter import Drafter, NoDrafter
from drafthead.core.errors import UserError
from drafthead.core.target.processor import end_helpers
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer.answers.emissions import in_time, result_of, streamed
from drafthead.infer.answers.results import DecodeResult, Stream, TextStream
from drafthead.infer.beams.beam_search import search
from drafthead.infer.chat_session import ChatSession, Message
from drafthead.infer.custom_generate import CustomGenerate
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.planner import FixedPlan, Planner
from drafthead.infer.loaded import (
    Draft,
    Fitting,
    described,
    length_of_paths,
    loaded_target,
    made_drafter,
    prepared_target,
    read_drafts,
)
from drafthead.infer.method import Method, planner_of, rule_of
from drafthead.infer.past import Memory
from drafthead.infer.request.options import read_options, refuse_in_pieces
from drafthead.infer.request.other_words import type_of_weights
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.request import DecodeOptions, Request
from drafthead.infer.request.text_pieces import text_pieces
from drafthead.infer.request_of import endless_request, request_of, single
from drafthead.infer.running_rows import RunningRows
from drafthead.infer.serving import (
    Answer,
    Requests,
    ServeRequest,
    WaitingRequests,
    own_options,
    refuse_of_one_call,
    serve,
    shared_options,
)
from drafthead.infer.timing.plans import Plans, StepKind
from drafthead.infer.timing.step_timing import PROMPT_TOKENS, VISIT_STEPS, time_or_visit
from drafthead.infer.verifiers import Verifier, verifier_for

logger = logging.getLogger(__name__)


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
        """Load a target by folder, GGUF file or hub id, or take a loaded model, and a drafter.

        `draft` is the path or hub name of a head or a draft model (`head:PATH` and `model:PATH` say
        which), ``layers:0-7,20-29`` for some of the target's own layers (``layers:0-9`` is an exit
        after ten), a `Drafter`, or None for plain decoding. Alone, or in a list beside one of
        these, lookup drafts what was written before: `lookup` in the prompt and the answer;
        `ngrams:FOLDER` also in what `drafthead data index` has counted; `answers` also in what
        this decoder reads and says from now on, up to the last 200,000 tokens. A tree then has the
        best nodes of both (`WithLookup`).

        A loaded model stays as it is, also where it is in training; pass its `tokenizer`, or that
        one's name, for prompts and answers that are texts. `others` are transformers' words:
        `torch_dtype` is taken, the rest is answered with ours.
        `tree_nodes` fixes the size of the trees, the root included, and turns the planner off. By
        default the planner sizes them by their cost on this machine, which it learns while
        decoding, and by how well they are accepted. `draft_tokens` is the most that a draft model,
        own layers or lookup propose on a path, by default 4. `compile` makes graphs of drafts,
        and where we have no kernels of passes, when they first run: minutes the first time and
        seconds later; the output stays the same. By default passes on a GPU are recorded, which
        takes as long as a few of them, and bfloat16 passes on a CPU run our kernels; with False
        they run as the model is written. `same_bits` is
        for 16 bits where neither holds: every pass reads 16 tokens, so that drafted text is that of
        plain decoding with the same setting; each is dearer. Code that comes
        with a model runs only with `trust_remote_code`. Raises UserError for what cannot be loaded,
        does not fit the target or has another name here.
        """
        drafts = read_drafts(draft)
        length = length_of_paths(draft_tokens, drafts)
        dtype = type_of_weights(dtype, others)
        loaded = loaded_target(target, dtype, str(device), trust_remote_code, tokenizer)
        drafter = made_drafter(drafts, Fitting(loaded, length, dtype, trust_remote_code))
        end_helpers()  # another thread may decode
        return decoder_for(loaded, drafter, tree_nodes, compile, draft_temperature, same_bits)

    def __repr__(self) -> str:
        return f"Decoder({described(self.target, self.drafter)})"

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | None = None, **options: Any
    ) -> DecodeResult:
        """Decode one prompt or a batch; `DecodeOptions` documents the options.

        A prompt is a string (a user message if the tokenizer has a chat template), chat messages,
        or token ids: a list, tensor or array [T], or a tokenizer's output. A batch is a list of
        prompts, or padded ids [B, T] with their `attention_mask`. Without a mask, pad tokens at
        both ends of rows [B, T] are dropped, as in transformers. A tokenizer's output may also come
        by its names, `generate(**inputs)`. Raises UserError for a request that cannot be honoured,
        and for an unknown option, with the right one.
        """
        run, emissions = self._begin(prompts, read_options(options))
        if (streamer := run.request.streamer) is not None:
            emissions = streamed(emissions, run.request, streamer)
        for _ in emissions:
            pass
        return self.result(run)

    def stream(self, prompt: Prompt | None = None, **options: Any) -> TextStream:
        """Decode one prompt as `generate` does; the text comes piece by piece.

        The pieces joined are the text that `generate` returns.
        """
        if self.tokenizer is None:
            raise UserError("the target has no tokenizer to turn tokens into text with")
        settings = read_options(options)
        refuse_in_pieces(settings)
        run, emissions = self._begin(prompt, settings)
        if len(run.request.prompts) > 1:
            raise UserError("stream takes one prompt; use generate or steps for a batch")
        [before] = run.request.prefixes or run.request.prompts
        pieces = text_pieces((emitted[0] for emitted in emissions), self.tokenizer, before)
        return Stream(pieces, run.stats, lambda: self.result(run))

    def steps(
        self, prompts: Prompt | Sequence[Prompt] | None = None, **options: Any
    ) -> Stream[Emitted]:
        """Decode as `generate` does, one pass each time that the stream is asked.

        Each pass gives {row number: new tokens}, of rows that gained some. Several decodings can
        take turns.
        """
        settings = read_options(options)
        refuse_in_pieces(settings)
        run, emissions = self._begin(prompts, settings)
        return Stream(emissions, run.stats, lambda: self.result(run))

    def as_custom_generate(self) -> CustomGenerate:
        """What `model.generate(..., custom_generate=...)` of this decoder's model takes.

        `model.generate` then decodes with this decoder, and returns what it always returns.
        """
        self.target.refuse_encoder("custom_generate")

        def begin(request: Request) -> tuple[BatchRun, Iterator[Emitted]]:
            return self._start(replace(request, draft_temperature=self.draft_temperature))

        return CustomGenerate(self.target, begin)

    def result(self, run: BatchRun) -> DecodeResult:
        """What a run has decoded so far; another thread may be decoding it."""
        return result_of(run, self.tokenizer)

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        fresh: bool = False,
        **options: Any,
    ) -> None:
        """Do before serving what the first answers would do: learn what steps cost, make graphs.

        For batches of each size, answered with the same options. Steps of each size of tree that
        may pay are timed, for 2 to 10 seconds, longer where steps are slow, and the times are kept.
        What was timed earlier is timed again only if `fresh`. Raises what `generate` raises.
        """
        settings = read_options(options)
        refuse_in_pieces(settings)
        if self.target.backend.compiles:  # the last row of a batch has graphs of its own
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
            for _ in islice(self.method(run).decode(run), VISIT_STEPS):
                pass
            return
        time_or_visit(plans, run, rule, fresh)

    def serve(self, requests: Requests, *, max_rows: int = 8, **options: Any) -> Iterator[Answer]:
        """Answer requests that come and go, up to `max_rows` of them in one batch.

        `requests` is an iterable, maybe endless, of prompts or `ServeRequest`s, or a `queue.Queue`
        of them, which None ends. The next ones are taken as soon as a row is free; with 32 rows or
        more as soon as a sixteenth of them is, since few prompts are dear to read. Answers come in
        the order in which they end. Each is that of `generate` for its prompt and seed alone; by
        default seeds count upwards from `seed`. A request that cannot be honoured gets an answer
        with an `error`, and does not disturb the others.

        The options are those of `generate` that requests of one batch can share; a `ServeRequest`
        has its own sampling and stop strings. Raises UserError for others by name, and for a
        max_rows below 1.
        """
        seed = shared_options(options, max_rows)

        def read(request: ServeRequest, number: int) -> Request:
            settings = read_options({**options, **own_options(request, seed + number)})
            return single(self.request(request.prompt, settings))

        return serve(WaitingRequests(requests, read), self.running_rows(max_rows), self.tokenizer)

    def running_rows(self, max_rows: int) -> RunningRows:
        """Rows for requests that come and go, up to `max_rows` of them; none is at work yet."""
        return RunningRows(self.method, self.rule, self.target, max_rows, self.memory)

    def remember(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Read what many prompts begin with, such as a system prompt, once for all of them.

        From then on `generate`, `stream`, `steps`, `serve` and `chat` read of prompts only what
        follows the tokens that all prompts of a batch have in common with a remembered one, the
        longest of several. Answers stay the same in float32; `stats.reused` counts the positions
        that were not read. A remembered prompt takes its part of the target's and the drafter's
        caches until `forget`, and is not used while the model has other weights or adapters.
        Raises UserError for what is not one prompt of `generate`.
        """
        self.target.refuse_encoder("remember")  # the encoder reads a text as a whole
        options = {"max_new_tokens": 1, "use_model_defaults": False}
        settings = read_options({**options, "chat_template_kwargs": chat_template_kwargs})
        run = BatchRun(single(self.request(prompt, settings)), self.target.device)
        if run.request.prompts[0] not in [past.tokens for past in self.memory.known()]:
            method, state = self.method(run), self.memory.state()
            self.memory.add(method.read(run, method.recall(run)), state)

    def forget(self) -> None:
        """Remember nothing any more, and let the memory go."""
        self.memory.pasts.clear()
        self.memory.kept.clear()

    def chat(self, system: str | None = None, **options: Any) -> ChatSession:
        """A conversation whose turns keep the caches of earlier ones, with the options of
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

    def _begin(self, prompts: Any, options: DecodeOptions) -> tuple[BatchRun, Iterator[Emitted]]:
        """Check the request and prepare its batch; passes run as the iterator is asked."""
        return self._start(self.request(prompts, options))

    def _start(self, request: Request) -> tuple[BatchRun, Iterator[Emitted]]:
        """The batch of a request, and what its passes emit, for as long as there is time."""
        run = BatchRun(request, self.target.device)
        method = self.method(run)
        passes = method.decode(run) if request.beams is None else search(method, run)
        return run, in_time(passes, run)

    def request(self, prompts: Any, options: DecodeOptions) -> Request:
        """The request in token ids and limits; raises UserError for what cannot be decoded."""
        return request_of(self.target, prompts, options, self.end_ids, self.draft_temperature)

    def rule(self, request: Request) -> Verifier:
        """The acceptance rule that a request names."""
        return rule_of(request, self.target, self.drafter)

    def method(self, run: BatchRun) -> Method:
        """How this batch is decoded; checks the verifier's name even where none is needed."""
        rule = self.rule(run.request)
        planner = planner_of(run, self.target, self._planner(run, rule))
        drafter: Drafter = NoDrafter()
        if isinstance(planner, FixedPlan) and planner.budget is None:  # nothing is ever proposed
            rule = verifier_for("auto", run.request.sampling.temperature)
        elif self.drafter is not None:
            drafter = self.drafter
        budgets = [*drafter.budgets, *([self.budget] if self.budget else [])]
        most = max([budget.nodes for budget in budgets], default=1)
        return Method(self.target, drafter, rule, planner, most, self.memory)

    def _planner(self, run: BatchRun, rule: Verifier) -> Planner:
        """What chooses the budget of each step."""
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

    Compiled, as it is, or for None recorded or with our kernels where that is possible;
    `same_bits` as for `Decoder.from_pretrained`. Raises UserError for settings of a drafter without
    one, and for `compile` and `same_bits` where the target cannot be compiled or cannot keep that
    promise.
    """
    is_new = not target.backend.compiles
    target = prepared_target(target, compile, same_bits)
    if drafter is None:
        for name, value in (("tree_nodes", tree_nodes), ("draft_temperature", draft_temperature)):
            if value is not None:
                raise UserError(f"{name}={value} needs a head, a draft model, own layers or lookup")
        return Decoder(target)
    backend = target.backend
    if compile or (compile is None and is_new and (backend.compiles or backend.has_kernels)):
        drafter.compile(target)
    budget = None
    if tree_nodes is not None:
        budget = Budget(tree_nodes, min(drafter.budgets[-1].depth, max(1, tree_nodes - 1)))
    return Decoder(target, drafter, budget, tree_nodes is None, draft_temperature)
