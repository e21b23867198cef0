"""Which hidden states of the target are read, and what was read."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureSpec:
    """Which hidden states a drafter reads.

    `layers` are decoder layer indices and mean the OUTPUT of that layer (0 is the first layer), in
    the order in which they are concatenated. Two ids stand for states that no layer puts out: -1
    for what enters the first layer, the embeddings, and the number of layers for the state after
    the final norm. `last` asks for that state beside the others.

    Who else numbers the states of L layers, for i = 0 to L - 1: transformers calls ours ``i``
    ``hidden_states[i + 1]``, and what it calls ``hidden_states[L]`` comes after the final norm.
    """

    layers: tuple[int, ...] = ()
    last: bool = True

    def with_last(self) -> "FeatureSpec":
        """The same layers and the last hidden state."""
        return FeatureSpec(self.layers, last=True)


@dataclass(frozen=True)
class Features:
    """Hidden states of the target at T positions."""

    last: torch.Tensor | None  # [B, T, D] after the final norm
    taps: tuple[torch.Tensor, ...] = ()  # one [B, T, D] for each of FeatureSpec.layers

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Features":
        """The same features with `function` applied to each tensor."""
        last = None if self.last is None else function(self.last)
        return Features(last, tuple(function(tap) for tap in self.taps))
