"""Hidden states of the target: which ones a drafter reads, and their values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureSpec:
    """The hidden states that a drafter reads.

    `layers` are decoder layer indices and mean the OUTPUT of that layer (0 is the first layer), in
    the order in which they are concatenated. Two ids are not outputs of a layer: -1 is the input of
    the first layer, the embeddings, and L, the number of layers, is the state after the final norm.
    `last` asks for that state as well.

    Our layer ``i`` is ``hidden_states[i + 1]`` in transformers, for i from 0 to L - 2; there
    ``hidden_states[L]`` comes after the final norm, which is our L.
    """

    layers: tuple[int, ...] = ()
    last: bool = True

    def with_last(self) -> "FeatureSpec":
        """These layers and the last hidden state."""
        return FeatureSpec(self.layers, last=True)


NO_FEATURES = FeatureSpec(layers=(), last=False)


@dataclass(frozen=True)
class Features:
    """Hidden states of the target at T positions."""

    last: torch.Tensor | None  # [B, T, D] after the final norm
    taps: tuple[torch.Tensor, ...] = ()  # one [B, T, D] for each of FeatureSpec.layers

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Features":
        """These features with `function` applied to each tensor [B, T, D]."""
        last = None if self.last is None else function(self.last)
        return Features(last, tuple(function(tap) for tap in self.taps))

    @classmethod
    def joined(
        cls, parts: "Sequence[Features]", join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> "Features":
        """The parts as one: `join` is given the tensors [...] of each kind."""
        last = [part.last for part in parts if part.last is not None]
        taps = zip(*(part.taps for part in parts), strict=True)
        return cls(join(last) if last else None, tuple(join([*each]) for each in taps))


def concatenated(parts: Sequence[Features], dim: int) -> Features:
    """Features [B, T, D] of rows (dimension 0) or positions (1) that follow each other, as one."""
    return parts[0] if len(parts) == 1 else Features.joined(parts, lambda s: torch.cat(s, dim))
