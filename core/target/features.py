"""Hidden states of the target: which ones a drafter reads, and their values."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureSpec:
    """Which hidden states a drafter reads.

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
