"""The entry for users: load a target with or without a drafter, and decode."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Unpack

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.drafting.drafter import Drafter, NoDrafter
from drafthead.heads.errors import UserError
from drafthead.heads.target.processor import tell_of_slow_bfloat16
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.beams.beam_search import beam_answers
from drafthead.infer.custom_generate import CustomGenerate
from drafthead.infer.drafters.with_lookup import learns_answers
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.emissions import in_time, streamed
from drafthead.infer.engine.logits_processing import processors_for
from drafthead.infer.engine.method import Method
from drafthead.infer.engine.past import Memory
from drafthead.infer.engine.planner import FixedPlan, Planner
from drafthead.infer.engine.results import DecodeResult, Stream, TextStream
from drafthead.infer.engine.score_record import LogprobRecord
from drafthead.infer.engine.stepper import steps_in_one_call
from drafthead.infer.loaded import (
    Draft,
    Fitting,
    described,
    length_of_paths,
    loaded_target,
    made_drafter,
    read_drafts,
)
from drafthead.infer.request.decode_options import (
    DecodeOptions,
    DecodeSettings,
    read_options,
    refuse_in_pieces,
)
from drafthead.infer.request.generation_config import refuse_other_start, with_own_settings
from drafthead.infer.request.other_words import OtherWords, type_of_weights, with_older_drafts
from drafthead.infer.request.padding import pad_token_of
from drafthead.infer.request.prompts import Prompt, encode, refuse_unknown_tokens
from drafthead.infer.request.request import Request
from drafthead.infer.request.stopping import stops_for
from drafthead.infer.request.text_pieces import text_pieces, texts_of
from drafthead.infer.serving.chat_session import ChatSession, Message
from drafthead.infer.serving.serve_options import chat_settings, own_options, shared_options
from drafthead.infer.serving.serve_request import Answer, ServeRequest
from drafthead.infer.serving.server import serve
from drafthead.infer.serving.waiting import Requests, WaitingRequests
from drafthead.infer.timing.plans import Plans, StepKind
from drafthead.infer.timing.step_timing import TIMING_SETTINGS, make_graphs, time_steps
from drafthead.infer.verifiers import Verifier, verifier_for

logger = logging.getLogger(__name__)


class Decoder:
    """A target and the drafter that proposes tokens for it.

    Several threads may decode at once, with one decoder or with several over one model: each pass
    over the model belongs to its caller.
    """

    # Held while steps are timed: two timings at once would measure each other.
    timing: ClassVar[Lock] = Lock()

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
        **others: Unpack[OtherWords],
    ) -> "Decoder":
        """Load a target by folder, GGUF file or hub id, or take a loaded model, and a drafter.

        `draft` is the path or hub name of a head or a draft model (`head:PATH` and `model:PATH` say
        which), ``layers:0-7,20-29`` for some of the target's own layers (``layers:0-9`` is an exit
        after ten), a `Drafter`, or None for plain decoding. Alone, or in a list beside one of
        these, lookup drafts what was written before: `lookup` in the prompt and the answer;
        `ngrams:FOLDER` also in what `drafthead data index` has counted; `answers` also in what
        this decoder reads and says from now on, up to the last 200,000 tokens. A tree then has the
        best nodes of both (`WithLookup`).

        A loaded model is frozen, and keeps its dtype and device; pass its `tokenizer`, or that
        one's name, for prompts and answers that are texts. `others` are older and transformers'
        words. `tree_nodes` fixes the size of the trees, the root included, and turns the planner
        off. By default the planner sizes them by their cost on this machine, which it learns while
        decoding, and by how well they are accepted. `draft_tokens` is the most that a draft model,
        own layers or lookup propose on a path, by default 4. `compile` makes graphs of the passes
        when they first run, minutes the first time and seconds later; the output stays the same. By
        default passes on a GPU are recorded, which takes as long as a few of them. Code that comes
        with a model runs only with `trust_remote_code`. Raises UserError for what cannot be loaded,
        does not fit the target or has another name here.
        """
        drafts = read_drafts(with_older_drafts(draft, others))
        length = length_of_paths(draft_tokens, drafts)
        dtype = type_of_weights(dtype, others)
        loaded = loaded_target(target, dtype, str(device), trust_remote_code, tokenizer)
        drafter = made_drafter(drafts, Fitting(loaded, length, dtype, trust_remote_code))
        return decoder_for(loaded, drafter, tree_nodes, compile, draft_temperature)

    def __repr__(self) -> str:
        return f"Decoder({described(self.target, self.drafter)})"

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | None = None, **options: Unpack[DecodeOptions]
    ) -> DecodeResult:
        """Decode one prompt or a batch; `DecodeOptions` documents the options.

        A prompt is a string (a user message if the tokenizer has a chat template), chat messages,
        or token ids: a list, tensor or array [T], or a tokenizer's output. A batch is a list of
        prompts, or padded ids [B, T] with their `attention_mask`. Without a mask, pad tokens at
        both ends of rows [B, T] are dropped, as in transformers. A tokenizer's output may also come
        by its names, `generate(**inputs)`. Raises UserError for a request that cannot be honoured,
        and for an unknown option, with the right one.
        """
        run, emissions, settings = self._begin(prompts, options)
        if settings.streamer is not None:
            emissions = streamed(emissions, run.request, settings.streamer)
        for _ in emissions:
            pass
        return self.result(run)

    def stream(self, prompt: Prompt | None = None, **options: Unpack[DecodeOptions]) -> TextStream:
        """Decode one prompt as `generate` does; the text comes piece by piece.

        The pieces joined are the text that `generate` returns.
        """
        if self.tokenizer is None:
            raise UserError("the target has no tokenizer to turn tokens into text with")
        run, emissions, settings = self._begin(prompt, options)
        refuse_in_pieces(settings)
        if len(run.request.prompts) > 1:
            raise UserError("stream takes one prompt; use generate or steps for a batch")
        pieces = text_pieces((emitted[0] for emitted in emissions), self.tokenizer)
        return Stream(pieces, run.stats, lambda: self.result(run))

    def steps(
        self, prompts: Prompt | Sequence[Prompt] | None = None, **options: Unpack[DecodeOptions]
    ) -> Stream[Emitted]:
        """Decode as `generate` does, one pass each time that the stream is asked.

        Each pass gives {row number: new tokens}, of rows that gained some. Several decodings can
        take turns.
        """
        run, emissions, settings = self._begin(prompts, options)
        refuse_in_pieces(settings)
        return Stream(emissions, run.stats, lambda: self.result(run))

    def as_custom_generate(self) -> CustomGenerate:
        """What `model.generate(..., custom_generate=...)` of this decoder's model takes.

        `model.generate` then decodes with this decoder, and returns what it always returns.
        """
        self.target.refuse_encoder("custom_generate")
        settings = read_options({})

        def begin(request: Request) -> tuple[BatchRun, Iterator[Emitted]]:
            own = replace(request, draft_temperature=self.draft_temperature)
            return self._start(own, settings)

        return CustomGenerate(self.target, begin)

    def result(self, run: BatchRun) -> DecodeResult:
        """What a run has decoded so far; another thread may be decoding it."""
        if run.request.beams is not None:
            return beam_result(run, self.tokenizer)
        rows, record = run.batch.rows, run.record
        sequences = [list(row.tokens) for row in rows]
        lengths = list(map(len, sequences))
        return DecodeResult(
            sequences=sequences,
            decoded=texts_of(sequences, self.tokenizer) if self.tokenizer else None,
            finish_reasons=[row.finish_reason for row in rows],
            prompt_lengths=list(map(len, run.request.prompts)),
            stats=run.stats,
            logprobs=record.of_rows(lengths) if isinstance(record, LogprobRecord) else None,
        )

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        fresh: bool = False,
        **options: Unpack[DecodeOptions],
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
            tokens = min(TIMING_SETTINGS.prompt_tokens, (self.max_length or sys.maxsize) // 2)
            prompts = random_prompts(self.target.vocab_size, rows, tokens)
            mask = torch.ones_like(prompts)
            # What is of prompts that are texts or messages has no meaning for these.
            there = replace(settings, template_arguments={}, continue_final_message=None)
            there = replace(there, attention_mask=mask)
            # Answers that do not end before everything was timed.
            endless = replace(self.request(prompts, there), end_ids=frozenset(), stops=())
            self._warm_up(BatchRun(endless, self.target.device), settings, fresh)

    def _warm_up(self, run: BatchRun, settings: DecodeSettings, fresh: bool) -> None:
        """Time the steps of a batch, or make a few of every kind."""
        rule, plans = self._rule(run, settings), self.plans
        if plans is None or not rule.follows:
            emissions = self.method(run, settings).decode(run)
            for _ in islice(emissions, TIMING_SETTINGS.visit_steps):
                pass
            return
        kind = StepKind.of(run, rule)
        costs = plans.costs(kind)
        steps = self.target, plans.drafter, run.request, rule, costs
        with Decoder.timing:
            if fresh or not costs.was_timed:
                time_steps(*steps)
                plans.keep_timed(kind)
            else:
                make_graphs(*steps)

    def serve(
        self, requests: Requests, *, max_rows: int = 8, **options: Unpack[DecodeOptions]
    ) -> Iterator[Answer]:
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
        options, seed = shared_options(options, max_rows)

        def read(request: ServeRequest, number: int) -> Request:
            settings = read_options({**options, **own_options(request, seed + number)})
            verifier_for(settings.verifier, settings.sampling.temperature)  # they may not fit
            return self.request(request.prompt, settings, single=True)

        def method_for(run: BatchRun) -> Method:
            return self.method(run, read_options(options))

        waiting = WaitingRequests(requests, read)
        return serve(waiting, method_for, self.target.device, self.tokenizer, max_rows)

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
        settings = read_options({"max_new_tokens": 1, "chat_template_kwargs": chat_template_kwargs})
        run = BatchRun(self.request(prompt, settings, single=True), self.target.device)
        if run.request.prompts[0] not in [past.tokens for past in self.memory.known()]:
            self.memory.add(self.method(run, settings).read(run))

    def forget(self) -> None:
        """Remember nothing any more, and let the memory go."""
        self.memory.pasts.clear()

    def chat(self, system: str | None = None, **options: Unpack[DecodeOptions]) -> ChatSession:
        """A conversation whose turns keep the caches of earlier ones, with the options of
        `generate`.

        Raises UserError when the target has no tokenizer with a chat template.
        """
        self.target.refuse_encoder("chat")
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise UserError("chat needs a tokenizer with a chat template")
        settings = chat_settings(options)

        def begin(messages: Sequence[Message]) -> tuple[BatchRun, Method]:
            request = self.request(messages, settings, single=True)
            run = BatchRun(request, self.target.device)
            return run, self.method(run, settings)

        messages = [] if system is None else [{"role": "system", "content": system}]
        return ChatSession(begin, self.result, self.tokenizer, messages)

    def _begin(
        self, prompts: Prompt | Sequence[Prompt] | None, options: DecodeOptions
    ) -> tuple[BatchRun, Iterator[Emitted], DecodeSettings]:
        """Check the request and prepare its batch; passes run as the iterator is asked."""
        settings = read_options(options)
        return *self._start(self.request(prompts, settings), settings), settings

    def _start(
        self, request: Request, settings: DecodeSettings
    ) -> tuple[BatchRun, Iterator[Emitted]]:
        """The batch of a request, and what its passes emit, for as long as there is time."""
        if request.beams is not None and learns_answers(self.drafter):
            raise UserError("num_beams does not go with learn_answers: most beams are no answers")
        run = BatchRun(request, self.target.device)
        return run, in_time(self.method(run, settings).decode(run), run)

    def request(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        settings: DecodeSettings,
        single: bool = False,
    ) -> Request:
        """The request in token ids and limits; raises UserError for what cannot be decoded.

        With `single` that is also more than one prompt.
        """
        pad = pad_token_of(self.target)
        texts = encode(
            settings.prompts(prompts),
            self.tokenizer,
            settings.attention_mask,
            pad,
            settings.template_arguments,
            continue_final_message=settings.continue_final_message,
        )
        if single and len(texts) > 1:
            raise UserError(f"a request has one prompt, got {len(texts)}")
        texts = [text for text in texts for _ in range(settings.num_return_sequences)]
        refuse_unknown_tokens(texts, self.target.vocab_size)
        refuse_other_start(settings.config, self.target.decoder_prompt)
        ids = [self.target.as_prompt(text) for text in texts]
        prefixes = [self.target.answer_prefix(prompt) for prompt in ids]
        seeds, limits = settings.seeds(len(ids)), settings.limits(prefixes, self.target.context)
        end_ids = self.end_ids if settings.end_ids is None else settings.end_ids
        custom, criteria = settings.logits_processor, settings.stopping_criteria
        config = settings.config
        if settings.use_model_defaults:
            own = getattr(self.target.model, "generation_config", None)
            config = with_own_settings(config, own, self.target.model.name_or_path or "the model")
        return Request(
            ids,
            limits,
            settings.sampling,
            seeds,
            end_ids,
            processors_for(self.target, config, custom, prefixes, limits, end_ids),
            stops_for(settings.stop_strings, criteria, self.tokenizer, prefixes),
            self.draft_temperature,
            max_seconds=settings.max_seconds,
            top_logprobs=settings.top_logprobs,
            prefixes=prefixes,
            beams=settings.beams,
            prefill_chunk=settings.prefill_chunk,
        )

    def _rule(self, run: BatchRun, settings: DecodeSettings) -> Verifier:
        """The acceptance rule that the options name."""
        in_graphs = steps_in_one_call(self.target, run)
        default = "match" if in_graphs or self.drafter is None else self.drafter.sampling_rule
        rule = verifier_for(settings.verifier, run.request.sampling.temperature, default)
        return rule.with_options(settings.rule_options)

    def method(self, run: BatchRun, settings: DecodeSettings) -> Method:
        """How this batch is decoded; checks the verifier's name even where none is needed."""
        rule = self._rule(run, settings)
        planner = self._planner(run, rule)
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
        return self.plans.planner(StepKind.of(run, rule), run.request.sampling.temperature)


def decoder_for(
    target: Target,
    drafter: Drafter | None,
    tree_nodes: int | None,
    compile: bool | None,
    draft_temperature: float | None = None,
) -> Decoder:
    """A decoder with trees of `tree_nodes` nodes, or of planned sizes for None.

    Compiled, as it is, or for None recorded where that is possible. Raises UserError for settings
    of a drafter without one, and for `compile` where the target cannot be compiled.
    """
    is_new = not target.backend.compiles
    if compile:
        target.refuse_encoder("compile")
        target.check_compilable()
    if is_new and (compile or (compile is None and can_record(target))):
        target = target.compiled(fuses=bool(compile))
    if not target.backend.compiles:
        tell_of_slow_bfloat16(target.device, target.dtype)
    if target.dtype.itemsize == 2 and not target.same_bits:
        tell_of_near_ties(type(target.model).__name__, target.precision)
    if drafter is None:
        for name, value in (("tree_nodes", tree_nodes), ("draft_temperature", draft_temperature)):
            if value is not None:
                raise UserError(f"{name}={value} needs a head, a draft model, own layers or lookup")
        return Decoder(target)
    if compile or (compile is None and is_new and target.backend.compiles):
        drafter.compile(target)
    budget = None
    if tree_nodes is not None:
        budget = Budget(tree_nodes, min(drafter.budgets[-1].depth, max(1, tree_nodes - 1)))
    return Decoder(target, drafter, budget, tree_nodes is None, draft_temperature)


def can_record(target: Target) -> bool:
    """Whether passes of a target are recorded by default: on a GPU, where that works."""
    if target.device.type != "cuda" or target.has_encoder:
        return False
    try:
        target.check_compilable()
    except UserError as reason:
        logger.info("passes are not recorded: %s", reason)
        return False
    return True


@cache
def tell_of_near_ties(model: str, precision: str) -> None:
    """Say, once for each kind of model, that its bits depend on how a text is read."""
    logger.info(
        "%s in %s runs torch's kernels, which round a token otherwise beside others: read in a "
        "batch, in a tree, or after what was read before, a prompt may get another answer at a "
        "near-tie",
        model,
        precision,
    )


def beam_result(run: BatchRun, tokenizer: PreTrainedTokenizerBase | None) -> DecodeResult:
    """What a beam search has found, when it has ended."""
    answers = beam_answers(run)
    sequences = [list(answer.tokens) for answer in answers]
    return DecodeResult(
        sequences=sequences,
        decoded=texts_of(sequences, tokenizer) if tokenizer else None,
        finish_reasons=[answer.finish_reason for answer in answers],
        prompt_lengths=[len(run.request.prompts[answer.prompt]) for answer in answers],
        stats=run.stats,
        scores=[answer.score for answer in answers],
    )


def random_prompts(vocab_size: int, rows: int, length: int) -> torch.Tensor:  # [rows, length]
    """Prompts that say the same twice, so that lookup has something to find."""
    half = -(-length // 2)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (rows, half), generator=generator).repeat(1, 2)[:, :length]
