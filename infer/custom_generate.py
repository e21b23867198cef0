"""`model.generate(..., custom_generate=...)`: transformers prepares a call, a Decoder decodes it.

transformers hands over the prompts with their padding, its own logits processors, filters and
stopping criteria. All of them are applied as they are: processors and criteria read the padded
rows, as in transformers' own loop. What comes back is what `model.generate` returns. What cannot
be honoured is refused by name.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
)

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.architecture import cache_argument
from drafthead.core.target.target import Target
from drafthead.infer.answers.emissions import put_tokens, refuse_batch
from drafthead.infer.answers.score_record import RowKind, RowRecord
from drafthead.infer.engine.batch_run import BatchRun, BeamAnswer, Emitted
from drafthead.infer.request.generation_config import refuse_unprepared
from drafthead.infer.request.processors import for_each_prompt
from drafthead.infer.request.prompts import masked, other_inputs, refuse_unknown_tokens
from drafthead.infer.request.request import BeamOptions, Request
from drafthead.infer.request.stopping import Stop, token_ids

Output = GenerateBeamDecoderOnlyOutput | GenerateDecoderOnlyOutput | torch.Tensor
Begin = Callable[[Request], tuple[BatchRun, Iterator[Emitted]]]
# The input in which `model.generate` hands over a cache, whatever the model calls it.
CACHE_INPUT = cache_argument(GenerationMixin.prepare_inputs_for_generation)
# What `model.generate` adds to every call; the rest of a call's inputs is refused by name.
# Token types number the segments of an encoder's input; decoders of texts do not read them.
PREPARED_INPUTS = {
    CACHE_INPUT, "attention_mask", "logits_to_keep", "position_ids", "token_type_ids", "use_cache",
}  # fmt: skip
# The filters of `SamplingConfig` in their order, with the attribute that holds the setting.
FILTERS: dict[type[LogitsProcessor], tuple[str, str]] = {
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
    TypicalLogitsWarper: ("typical_p", "mass"),
}


@dataclass(frozen=True)
class CustomGenerate:
    """The argument `custom_generate` of `model.generate`; made by `Decoder.as_custom_generate`.

    Sampled answers take their seeds from torch's random numbers, so `torch.manual_seed` fixes them.
    In a batch a row that has ended is filled up with the pad token, and its `scores` and `logits`
    with zeros: nothing is computed for it. No cache is returned. Beam search returns `sequences`
    and, with `output_scores`, their `sequences_scores`; it keeps no scores of every token.
    """

    target: Target
    begin: Begin = field(repr=False)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # [B, T] with padding
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Output:
        """Decode a prepared call; raises UserError for what cannot be honoured."""
        if model is not self.target.model:
            raise UserError(
                "custom_generate was made by a Decoder of another model: make it from this one"
            )
        refuse_unprepared(generation_config)
        options = dropped_arguments()
        prompts = prompts_of(input_ids, model_kwargs)
        beams = prepared_beams(generation_config)
        if beams is not None:  # transformers has repeated each prompt
            input_ids, prompts = input_ids[:: beams.num_beams], prompts[:: beams.num_beams]
        call = PreparedCall(input_ids, prompts, generation_config, beams)
        request = call.request(self.target, logits_processor, stopping_criteria)
        run, emissions = self.begin(request)
        if (streamer := options.get("streamer")) is not None:
            refuse_batch(len(prompts))  # transformers has put the prompt
            emissions = put_tokens(emissions, streamer)
        for _ in emissions:
            pass
        return call.output(run)


@dataclass(frozen=True)
class PreparedCall:
    """One call as `model.generate` has prepared it."""

    input_ids: torch.Tensor  # [B, T] with padding
    prompts: Sequence[Sequence[int]]  # without padding
    config: GenerationConfig
    beams: BeamOptions | None = None

    def request(
        self, target: Target, processors: LogitsProcessorList, criteria: StoppingCriteriaList
    ) -> Request:
        """The call as a request to the engine."""
        refuse_unknown_tokens(self.prompts, target.vocab_size)
        rows, config = self.input_ids.tolist(), self.config
        sampling = SamplingConfig()
        kept = list(processors)
        if config.do_sample:
            kept, sampling = without_filters(kept)
        ends, most, others = read_criteria(criteria)
        if self.beams is not None and others:
            name = type(others[0]).__name__
            raise UserError(f"num_beams cannot be combined with {name}: leave one of them out")
        new, context = most - len(rows[0]), target.context
        room = [context.room(f"prompt {n}", len(p), new) for n, p in enumerate(self.prompts)]
        seeds = torch.randint(2**62, (len(rows),)).tolist() if config.do_sample else [0] * len(rows)
        return Request(
            prompts=self.prompts,
            limits=room,
            sampling=sampling,
            seeds=seeds,
            end_ids=ends,
            processors=for_each_prompt(kept, rows, target),
            stops=[Stop(row, others) for row in rows] if others else [],
            new_record=partial(RowRecord, kinds) if (kinds := self.kept_rows) else None,
            prefixes=rows,
            beams=self.beams,
        )

    @property
    def kept_rows(self) -> list[RowKind]:
        """The kinds of rows [V] that the call wants for each token."""
        if not self.config.return_dict_in_generate or self.beams is not None:
            return []
        kinds: dict[RowKind, bool | None] = {
            "scores": self.config.output_scores,
            "logits": self.config.output_logits,
        }
        return [kind for kind, wanted in kinds.items() if wanted]

    def output(self, run: BatchRun) -> Output:
        """The answers as `model.generate` returns them."""
        if self.beams is not None:
            return self.beam_output(run.beam_answers)
        answers = [row.tokens for row in run.rows]
        sequences = torch.cat([self.input_ids, self.padded(answers)], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        length = sequences.shape[1] - self.input_ids.shape[1]
        rows: dict[str, Any] = {}
        if isinstance(run.record, RowRecord):
            record = run.record
            rows = {kind: record.by_token(kind, len(answers), length) for kind in self.kept_rows}
        return GenerateDecoderOnlyOutput(sequences=sequences, **rows)  # type: ignore[arg-type]

    def beam_output(self, answers: Sequence[BeamAnswer]) -> Output:
        """The answers of beam search as `model.generate` returns them."""
        prompts = self.input_ids[[answer.prompt for answer in answers]]
        tokens = self.padded([answer.tokens for answer in answers])
        sequences = torch.cat([prompts, tokens], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        scores = torch.tensor([answer.score for answer in answers], device=sequences.device)
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]  # transformers wants a LongTensor
            sequences_scores=scores if self.config.output_scores else None,
        )

    def padded(self, answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """The answers [B, T] with pad tokens after the shorter ones.

        Raises UserError where there is no pad token and one is needed.
        """
        longest = max(map(len, answers))
        pad = self.config._pad_token_tensor
        if pad is None and min(map(len, answers)) < longest:
            raise UserError("answers of different lengths need a pad token: set pad_token_id")
        fill = 0 if pad is None else int(pad)
        if self.beams is not None and fill == 0 and self.config._eos_token_tensor is not None:
            fill = int(self.config._eos_token_tensor[0])  # what transformers' beam search does
        rows = [[*answer, *[fill] * (longest - len(answer))] for answer in answers]
        return torch.tensor(rows, device=self.input_ids.device)


def prepared_beams(config: GenerationConfig) -> BeamOptions | None:
    """The beams of a call, whose config has all defaults; None without beams.

    Raises UserError for what beam search cannot do here.
    """
    if config.num_beams == 1:
        return None
    if config.do_sample:
        raise UserError("beam search does not sample: leave out num_beams or do_sample")
    if config.output_logits:
        raise UserError("output_logits cannot be combined with num_beams: leave one of them out")
    return BeamOptions(
        config.num_beams,
        config.length_penalty,
        config.early_stopping,
        config.num_return_sequences,
    )


def holds_tokens(cache: Cache) -> bool:
    """Whether a cache of transformers has read anything; one without attention counts no tokens."""
    try:
        return cache.get_seq_length() > 0
    except ValueError:
        return cache.has_previous_state()


def prompts_of(input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> list[list[int]]:
    """The rows of input_ids [B, T] without their padding.

    Raises UserError for inputs of the model that are not read here.
    """
    if others := other_inputs(inputs, PREPARED_INPUTS):
        raise UserError(f"{others[0]} is not supported with custom_generate: leave it out")
    cache = inputs.get(CACHE_INPUT)
    if cache is not None and holds_tokens(cache):
        raise UserError(f"tokens in {CACHE_INPUT} are not supported with custom_generate")
    mask = inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if positions is not None:
        refuse_positions(positions, torch.ones_like(input_ids) if mask is None else mask)
    rows: list[list[int]] = input_ids.tolist()
    prompts = rows if mask is None else masked(rows, mask.tolist())
    if not all(prompts):
        raise UserError(f"prompt {[bool(p) for p in prompts].index(False)} is empty")
    return prompts


def refuse_positions(
    positions: torch.Tensor,  # [B, T], [1, T] or [4, B, T]
    mask: torch.Tensor,  # [B, T]
) -> None:
    """Raise UserError for positions that do not count what mask [B, T] keeps.

    Models of images number texts four times, three of them by the place in an image.
    """
    counted = (mask.long().cumsum(-1) - 1).to(positions.device)
    positions, counted, kept = torch.broadcast_tensors(
        positions, counted, mask.to(positions.device)
    )
    if not positions[kept != 0].equal(counted[kept != 0]):
        raise UserError("position_ids must count the tokens of the prompts: leave them out")


def without_filters(
    processors: list[LogitsProcessor],
) -> tuple[list[LogitsProcessor], SamplingConfig]:
    """The processors before the last filters, and these filters as a `SamplingConfig`.

    transformers appends temperature, top-k, top-p, min-p and typical-p in this order. The engine
    has its own, which read a tree's logits at once. From a list that ends in another way, such as
    with epsilon cut-off, nothing is taken: a processor can do everything, only slower.
    """
    kept, settings = list(processors), {"temperature": 1.0}
    for kind, (name, attribute) in reversed(FILTERS.items()):
        if kept and type(kept[-1]) is kind and is_plain(kept[-1]):
            settings[name] = getattr(kept.pop(), attribute)
    return kept, SamplingConfig(**settings)  # type: ignore[arg-type]  # top_k is an int


def is_plain(processor: LogitsProcessor) -> bool:
    """Whether a filter removes tokens with -inf, and may leave a single one."""
    least, value = (getattr(processor, n, None) for n in ("min_tokens_to_keep", "filter_value"))
    return least in (None, 1) and value in (None, -float("inf"))


def read_criteria(
    criteria: StoppingCriteriaList,
) -> tuple[frozenset[int], int, list[StoppingCriteria]]:
    """End tokens, the most tokens of prompt and answer, and the other criteria."""
    ends, most, others = frozenset[int](), [], []
    for each in criteria:
        if type(each) is EosTokenCriteria:
            ends |= token_ids(each.eos_token_id.tolist())
        elif type(each) is MaxLengthCriteria:
            most.append(each.max_length)
        else:
            others.append(each)
    return ends, min(most), others


def dropped_arguments() -> dict[str, Any]:
    """The arguments of the `model.generate` that has called, which it does not hand on.

    transformers gives a callable neither `streamer` nor `assistant_model` nor `synced_gpus`. A
    streamer that never gets a token would let its reader wait forever, so they are read where they
    are: in the frame of the caller. Raises UserError for those that cannot be honoured.
    """
    frame = sys._getframe(2)  # of the caller of `CustomGenerate.__call__`
    code: CodeType = inspect.unwrap(GenerationMixin.generate).__code__
    arguments = dict(frame.f_locals) if frame.f_code is code else {}
    for name in ("assistant_model", "synced_gpus"):
        if arguments.get(name):
            raise UserError(f"{name} is not supported with custom_generate: leave it out")
    return arguments
