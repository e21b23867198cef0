"""A checked request: what to decode, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers.generation.logits_process import LogitsProcessorList

from drafthead.heads.cache import READ_CHUNK
from drafthead.heads.sampling import SamplingConfig
from drafthead.infer.request.stopping import Stop


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
    def reads_plain_logits(self) -> bool:
        """Whether tokens follow from the target's logits by nothing but a temperature."""
        return self.sampling.whole and not self.processors
