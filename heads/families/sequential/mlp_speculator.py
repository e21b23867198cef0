"""MLP speculator (Wertheimer et al., 2024, arXiv 2404.19124): a recurrent MLP on the hidden state.

Each step takes one token into the state, state <- GELU(norm(W state + c embedding(token))), and
guesses the next from it; every step has weights of its own unless they are tied.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, rms_norm

from drafthead.core.settings import Count, FromZero, settings
from drafthead.core.target.target import Target
from drafthead.heads.base import ForTraining, register_head
from drafthead.heads.families.sequential.head import SequentialHead
from drafthead.heads.objectives.losses import DepthDecay, LossName

NORM_EPS = 1e-6


@settings
class MlpSpeculatorConfig:
    """Shape and loss of an MLP speculator. Sizes are filled in from the target."""

    num_heads: Count = 4  # steps, and so tokens drafted
    inner_size: FromZero = 0  # of the state; 0 is the target's hidden size
    tie_weights: bool = False  # one set of weights for all steps; the first projection is its own
    scale_input: bool = False  # normalise the target's hidden state first
    loss: ForTraining[LossName] = "hard"  # a name in heads.objectives.losses.TOKEN_LOSSES
    depth_decay: ForTraining[DepthDecay] = 1.0  # step k's loss weighs depth_decay ** (k - 1)
    hidden_size: int = 0
    vocab_size: int = 0


class ShiftedNorm(nn.Module):
    """RMS norm with a scale and a shift."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Maps [..., S] to [..., S], computed in float32."""
        normed = rms_norm(state.float(), state.shape[-1:], eps=NORM_EPS)
        return (normed * self.weight + self.bias).to(state.dtype)


@register_head("mlp_speculator", MlpSpeculatorConfig)
class MlpSpeculator(SequentialHead):
    """An MLP speculator. First states are hidden states [..., D], all others have inner_size S.

    A tied module is one module that its own step and all later steps use.
    """

    def __init__(self, config: MlpSpeculatorConfig):
        super().__init__(config)
        inner, vocab, steps = config.inner_size, config.vocab_size, config.num_heads
        own = 1 if config.tie_weights else steps
        # The first projection reads the hidden state, so the steps share at most the second.
        widths = [config.hidden_size, *[inner] * (steps - 1)][: own + 1]
        self.embeddings = nn.ModuleList(nn.Embedding(vocab, inner) for _ in range(own))
        self.projections = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.norms = nn.ModuleList(ShiftedNorm(inner) for _ in range(own))
        self.outputs = nn.ModuleList(nn.Linear(inner, vocab, bias=False) for _ in range(own))
        # After all steps half of the state's variance is still the hidden state's.
        state_weight = 0.5 ** (0.5 / steps)
        token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
        self.token_scale = token_weight / state_weight

    @classmethod
    def sized(cls, config: MlpSpeculatorConfig, target: Target) -> Any:
        """The sizes of the target; the state is as wide as its hidden states unless given."""
        sized = super().sized(config, target)
        return replace(sized, inner_size=config.inner_size or target.hidden_size)

    def initialize(self, target: Target) -> None:
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=self.config.inner_size**-0.5)

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D], normalised and divided by sqrt(2) where so configured."""
        if not self.config.scale_input:
            return hidden
        normed = rms_norm(hidden.float(), hidden.shape[-1:], eps=NORM_EPS)
        return (normed / math.sqrt(2)).to(hidden.dtype)

    def advance(
        self, state: torch.Tensor, tokens: torch.Tensor, index: int, target: Target
    ) -> torch.Tensor:
        """GELU(norm(W state + token_scale x embedding(tokens))) [..., S]."""
        projection, embedding, norm = (
            of_step(modules, index) for modules in (self.projections, self.embeddings, self.norms)
        )
        return gelu(norm(projection(state) + self.token_scale * embedding(tokens)))

    def token_logits(self, index: int, state: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [..., V] of step `index` from its state [..., S]."""
        return target.finish_logits(of_step(self.outputs, index)(state))


def of_step(modules: nn.ModuleList, index: int) -> nn.Module:
    """The module of step `index`: its own or, where steps share, the last there is."""
    return modules[min(index, len(modules) - 1)]
