"""A checked request: what to decode, and how."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers.generation.logits_process import LogitsProcessorList

from drafthead.heads.kv_cache.column_cache import READ_CHUNK
from drafthead.heads.sampling import SamplingConfig
from drafthead.infer.beams.beam_options import BeamOptions
from drafthead.infer.request.stopping import Stop

# Under the names of `model.generate`'s output: after and before processors, temperature, filters.
RowKind = Literal["scores", "logits"]


@dataclass(frozen=True)
class Request:
    """What to decode, and how."""

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # most new tokens, for each prompt
    sampling: SamplingConfig
    seeds: Sequence[int]  # one for each prompt
    end_ids: frozenset[int]
    processors: Sequence[LogitsProcessorList] = ()  # one for each prompt, or none at all
    stops: Sequence[Stop] = ()  # one for each prompt, or none at all
    draft_temperature: float | None = None  # at which children are drawn; None: as the target's
    max_seconds: float | None = None  # answers end at the first step after this time
    top_logprobs: int | None = None  # alternatives to record beside each token; None: no record
    kept_rows: Collection[RowKind] = ()  # which whole rows [V] are recorded for each token
    # What processors read before an answer where it is not the prompt: the prompt with padding.
    prefixes: Sequence[Sequence[int]] | None = None
    beams: BeamOptions | None = None  # of beam search; None: one answer to each prompt
    prefill_chunk: int = READ_CHUNK  # positions of each prompt that one pass reads

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
