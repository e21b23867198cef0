"""The entry for users: load a target with or without a drafter, and decode."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from drafthead.heads.base import DraftHead
from drafthead.heads.checkpoint import load_head
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.engine.batch_run import BatchRun, Emitted, Request
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.engine.logits_processing import processors_for
from drafthead.infer.engine.loop import speculate
from drafthead.infer.engine.plain import decode_plainly
from drafthead.infer.engine.planner import AdaptivePlan, FixedPlan, Planner
from drafthead.infer.engine.results import DecodeResult, DecodeStats
from drafthead.infer.request.generation_options import GenerationOptions, read_options, token_ids
from drafthead.infer.request.prompts import Prompt, encode, is_single, text_pieces
from drafthead.infer.request.stopping import stops_for
from drafthead.infer.timing.timing_cache import rows_timed, step_seconds
from drafthead.infer.verifiers import Verifier, verifier_for

logger = logging.getLogger(__name__)

DEFAULT_CHAIN = 4  # tokens that a draft model or prompt lookup drafts


class Decoder:
    """A target and what drafts for it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        budget: Budget | None = None,
        adaptive: bool = False,
        draft_temperature: float | None = None,
    ):
        """Decode with `drafter`, or plainly without one.

        `budget` is what each step may spend on its tree, by default the most that the drafter uses.
        With `adaptive` the planner chooses it step by step instead, from measured times and what is
        accepted; it decodes plainly while nothing else pays. `draft_temperature` is that of drawn
        proposals where it is to differ from the target's; it changes how many are accepted, and
        nothing of the output's distribution.
        """
        self.target, self.drafter = target, drafter
        self.budget = budget or (drafter.budgets[-1] if drafter is not None else None)
        self.adaptive = adaptive
        if draft_temperature is not None and not draft_temperature > 0:
            raise UserError(f"draft_temperature must be above 0, got {draft_temperature}")
        self.draft_temperature = draft_temperature
        self.plans: dict[tuple[str, float, int], AdaptivePlan] = {}
        self.tokenizer = target.tokenizer
        self.max_length = target.max_length
        self.end_ids = end_token_ids(target)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        head: str | Path | None = None,
        draft_model: str | Path | None = None,
        prompt_lookup: bool = False,
        tree_nodes: int | None = None,
        draft_tokens: int = DEFAULT_CHAIN,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        compile: bool = False,
        draft_temperature: float | None = None,
    ) -> "Decoder":
        """Load a target by folder or hub id, and at most one drafter.

        `tree_nodes` fixes the size of the proposals, the root included; by default the planner
        sizes them by what they cost on this machine and how well they are accepted. `draft_tokens`
        is the most that a draft model or prompt lookup proposes a step. `compile` makes graphs of
        the passes when they first run: minutes once, seconds when the same was compiled before, and
        the same output. `draft_temperature` is the constructor's. Code that comes with a model runs
        only with `trust_remote_code`. Raises UserError when something cannot be loaded or does not
        fit the target.
        """
        if sum([head is not None, draft_model is not None, prompt_lookup]) > 1:
            raise UserError("choose one of head, draft_model and prompt_lookup")
        loaded = Target.from_pretrained(target, dtype, device, trust_remote_code)
        drafter: Drafter | None = None
        if head is not None:
            drafter = head_drafter(load_head(Path(head), loaded), loaded)
        elif draft_model is not None:
            small = Target.from_pretrained(draft_model, dtype, device, trust_remote_code)
            drafter = DraftModel(small, loaded, draft_tokens)
        elif prompt_lookup:
            drafter = PromptLookup(draft_tokens)
        return decoder_for(loaded, drafter, tree_nodes, compile, draft_temperature)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        verifier: str = "auto",
        seed: int | Sequence[int] = 0,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
    ) -> DecodeResult:
        """Decode one prompt or a batch.

        A prompt is a string (a user message if the tokenizer has a chat template), chat messages,
        or token ids. Temperature 0 is greedy. `verifier` `auto` is a lossless one: `greedy`, and
        above 0 `match` with planned trees and in compiled graphs, else `rejection`; lossy ones are
        used only by name. A row's answer depends on its own seed alone: pass one seed for each row,
        or an int from which the rows count upwards.

        `generation_config` carries everything else under transformers' names: penalties, n-grams,
        bad words, forced and suppressed tokens, and also `frequency_penalty` and
        `presence_penalty`, which transformers lacks. Arguments win over it; without either,
        decoding is greedy, of up to 128 tokens, and nothing is filtered. Options that cannot be
        honoured raise UserError by name. `logits_processor` is called behind every node of a token
        tree, as in `model.generate` behind every token, so its processors must be functions of
        `input_ids` and `scores` alone. `stopping_criteria` are asked row by row after every token.
        """
        options = read_options(generation_config, max_new_tokens, temperature, top_k, top_p)
        run = self._run(prompts, options, logits_processor, stopping_criteria, seed)
        for _ in self._decode(run, verifier):
            pass
        sequences = [row.tokens for row in run.batch.rows]
        texts = (
            self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
            if self.tokenizer
            else []
        )
        finished = [row.finished for row in run.batch.rows]
        return DecodeResult(sequences, texts, finished, run.stats)

    def steps(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        verifier: str = "auto",
        seed: int | Sequence[int] = 0,
    ) -> tuple[Iterator[Emitted], DecodeStats]:
        """Decode a batch pass by pass; arguments as for `generate`.

        Yields what each pass gives each row that has gained anything, as {row number: tokens}. Each
        pass runs when it is asked for, so that several decodings can take turns. The account is
        complete once they have ended.
        """
        options = read_options(None, max_new_tokens, temperature, None, None)
        run = self._run(prompts, options, (), (), seed)
        return self._decode(run, verifier), run.stats

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        verifier: str = "auto",
        seed: int = 0,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
    ) -> Iterator[str]:
        """Decode one prompt and yield its text as it comes; arguments as for `generate`."""
        pieces, _ = self.stream_with_stats(
            prompt,
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            verifier,
            seed,
            generation_config,
            logits_processor,
            stopping_criteria,
        )
        return pieces

    def stream_with_stats(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        verifier: str = "auto",
        seed: int = 0,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
    ) -> tuple[Iterator[str], DecodeStats]:
        """As `stream`, with statistics that are complete once the text has ended."""
        if not is_single(prompt):
            raise UserError("stream takes one prompt; use generate for a batch")
        if self.tokenizer is None:
            raise UserError("the target has no tokenizer to turn tokens into text with")
        options = read_options(generation_config, max_new_tokens, temperature, top_k, top_p)
        run = self._run(prompt, options, logits_processor, stopping_criteria, seed)
        emitted = (step[0] for step in self._decode(run, verifier))
        return text_pieces(emitted, self.tokenizer), run.stats

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions,
        custom: Sequence[LogitsProcessor],
        criteria: Sequence[StoppingCriteria],
        seed: int | Sequence[int],
    ) -> BatchRun:
        """Check the request and prepare the batch."""
        ids = encode(prompts, self.tokenizer)
        seeds = [seed + row for row in range(len(ids))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(ids):
            raise UserError(f"{len(ids)} prompts need {len(ids)} seeds or one, got {len(seeds)}")
        limits = [self._limit(number, row, options) for number, row in enumerate(ids)]
        end_ids = self.end_ids if options.end_ids is None else options.end_ids
        processors = processors_for(self.target, options.config, custom, ids, limits, end_ids)
        stops = stops_for(options.stop_strings, criteria, self.tokenizer, ids)
        request = Request(
            ids,
            limits,
            options.sampling,
            seeds,
            end_ids,
            processors,
            stops,
            self.draft_temperature,
        )
        if self.drafter is None:
            return BatchRun(self.target, request, FeatureSpec(layers=(), last=False), max_nodes=1)
        assert self.budget is not None
        largest = self.drafter.budgets[-1] if self.adaptive else self.budget
        return BatchRun(self.target, request, self.drafter.features, largest.nodes)

    def _limit(self, number: int, ids: list[int], options: GenerationOptions) -> int:
        """Most new tokens for a prompt: what was asked for, or what the context has room for."""
        outside = [token for token in ids if not 0 <= token < self.target.vocab_size]
        if outside:
            raise UserError(
                f"prompt {number} holds token id {outside[0]}, but the target's vocabulary ends at "
                f"{self.target.vocab_size - 1}"
            )
        asked = options.limit(len(ids))
        if asked < 1:
            raise UserError(
                f"prompt {number} has {len(ids)} tokens, but max_length is {options.max_length}: "
                "set max_new_tokens instead"
            )
        if self.max_length is None:
            return asked
        if len(ids) >= self.max_length:
            raise UserError(
                f"prompt {number} has {len(ids)} tokens, but the target's context holds "
                f"{self.max_length}: shorten the prompt"
            )
        return min(asked, self.max_length - len(ids))

    def _decode(self, run: BatchRun, verifier: str) -> Iterator[Emitted]:
        """The loop that suits the drafter; checks the verifier's name even where none is needed."""
        quick = self.adaptive or run.graphs is not None
        rule = verifier_for(verifier, run.request.sampling.temperature, follows=quick)
        if self.drafter is None:
            return decode_plainly(run)
        planner = self._planner(run, rule)
        if isinstance(planner, FixedPlan) and planner.budget is None:
            return decode_plainly(run)  # nothing would ever be proposed
        return speculate(run, self.drafter, planner, rule)

    def _planner(self, run: BatchRun, rule: Verifier) -> Planner:
        """Who chooses the budgets.

        The answers of a rule that draws children depend on the tree. They must depend on the seed
        alone, not on the rows beside or on what was decoded before: their budget is chosen once,
        as for a single row.
        """
        if not self.adaptive:
            return FixedPlan(self.budget)
        assert self.drafter is not None
        rows = rows_timed(rule, len(run.lengths))
        key = (rule.name, run.request.sampling.temperature, rows)
        if key not in self.plans:
            seconds = step_seconds(self.target, self.drafter, rows, rule)
            chances = {budget: self.drafter.chances(budget) for budget in self.drafter.budgets}
            self.plans[key] = AdaptivePlan(seconds, chances)
        plan = self.plans[key]
        return FixedPlan(plan.choose()) if rule.draws_children else plan


def decoder_for(
    target: Target,
    drafter: Drafter | None,
    tree_nodes: int | None,
    compile: bool,
    draft_temperature: float | None = None,
) -> Decoder:
    """A decoder with proposals of a fixed size or planned ones, compiled if asked for."""
    if compile and not isinstance(target, CompiledTarget):
        target = CompiledTarget(target)
    if drafter is None:
        return Decoder(target)
    if compile:
        drafter.compile()
    budget = None
    if tree_nodes is not None:
        budget = Budget(tree_nodes, min(drafter.budgets[-1].depth, max(1, tree_nodes - 1)))
    return Decoder(target, drafter, budget, tree_nodes is None, draft_temperature)


def head_drafter(head: DraftHead, target: Target) -> Drafter:
    """The head with trees of its own choice; one that was never measured drafts chains, aloud."""
    if not head.path_counts:
        logger.warning("the head has no measured acceptance: it drafts a chain instead of a tree")
    return head.drafter(target)


def end_token_ids(target: Target) -> frozenset[int]:
    """The tokens that end an answer, as `model.generate` takes them."""
    ends = target.model.generation_config.eos_token_id if target.model.generation_config else None
    if ends is None:
        ends = target.config.eos_token_id
    if ends is None:
        return frozenset()
    return token_ids(ends)
