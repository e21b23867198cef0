"""A request: what to decode and how, as every step reads it; `read_options` makes its options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.infer.request.stopping import Stop

MOST_BEAMS = 8
EarlyStopping: TypeAlias = bool | Literal["never"]


class Record(Protocol):
    """What keeps the scores of tokens as steps commit them."""

    def add(
        self,
        numbers: Sequence[int | None],  # of the rows of these tensors; None for rows that ended
        logits: torch.Tensor,  # [B, P, V] of the target
        scores: torch.Tensor,  # [B, P, V] the same after the logits processors
        tokens: Sequence[Sequence[int]],  # chosen from them, up to P in each row
    ) -> None:
        """Record the next tokens of each active row."""

    def take_rows(self, rows: Sequence[tuple[Any, int]]) -> None:
        """Go on with rows of records, each the row of that number; they are numbered again."""


@dataclass(frozen=True)
class BeamOptions:
    """The options of beam search, under the names of `GenerationConfig`."""

    num_beams: int  # W, at least 2
    length_penalty: float = 1.0  # an answer's score is divided by its length to this power
    # When a prompt's search ends before the limit: with True as soon as there are W answers; with
    # False when a beam that ended now could not be one of the W best; with "never" when none that
    # ended later could.
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1  # answers to each prompt, the best ones

    def __post_init__(self) -> None:
        """Raises UserError for more beams than `MOST_BEAMS`, and for more answers than beams."""
        if self.num_beams > MOST_BEAMS:
            raise UserError(f"num_beams must be at most {MOST_BEAMS}, got {self.num_beams}")
        if not 1 <= self.num_return_sequences <= self.num_beams:
            raise UserError(
                f"num_return_sequences must be between 1 and num_beams={self.num_beams}, got "
                f"{self.num_return_sequences}"
            )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call, checked, with defaults and the generation config filled in."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    config: GenerationConfig = field(default_factory=GenerationConfig)  # for logits processors
    max_new_tokens: int | None = None  # None: max_length alone limits the answer
    max_length: int | None = None  # of prompt and answer together
    own_ends: frozenset[int] | None = None  # the call's end tokens; None: the target's
    stop_strings: tuple[str, ...] = ()
    stopping_criteria: Sequence[StoppingCriteria] = ()
    logits_processor: Sequence[LogitsProcessor] = ()
    verifier: str = "auto"
    rule_options: Mapping[str, float] = field(default_factory=dict)  # of the verifier, where given
    seed: int | Sequence[int] = 0  # the first row's seed, or one for each row
    attention_mask: object = None  # of prompts that are token ids; checked with them
    tokenized: Mapping[str, Any] = field(default_factory=dict)  # prompts that came by name
    continue_final_message: bool | None = None
    prefill_chunk: int | None = None  # positions of each prompt that one pass reads
    num_return_sequences: int = 1  # of beam search: see `beams`
    max_seconds: float | None = None  # answers end at the first step after this time
    top_logprobs: int | None = None  # alternatives to record beside each token; None: no record
    streamer: BaseStreamer | None = None
    beams: BeamOptions | None = None  # None: no beam search
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    use_model_defaults: bool = True


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """What to decode, and how: the options of a call with its prompts as token ids."""

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # most new tokens, for each prompt
    seeds: Sequence[int]  # one for each prompt
    end_ids: frozenset[int] = frozenset()
    processors: Sequence[LogitsProcessorList] = ()  # one for each prompt, or none at all
    stops: Sequence[Stop] = ()  # one for each prompt, or none at all
    draft_temperature: float | None = None  # at which children are drawn; None: as the target's
    new_record: Callable[[], Record] | None = None  # of the scores of tokens; None: none is kept
    # What processors read before an answer where it is not the prompt: the prompt with padding.
    prefixes: Sequence[Sequence[int]] | None = None
    cache_salt: str = ""  # what was read is known to requests of the same salt alone

    @property
    def draft_sampling(self) -> SamplingConfig:
        """How the draft's logits become the distribution that children are drawn from.

        Any distribution that is known before the draw keeps the output exact.
        """
        if self.draft_temperature is None or self.sampling.greedy:
            return self.sampling
        return replace(self.sampling, temperature=self.draft_temperature)

    @property
    def samples_in_graphs(self) -> bool:
        """Whether a step's graph can compute the target's law: no processors, no `typical_p`."""
        return self.sampling.typical_p == 1 and not self.processors
