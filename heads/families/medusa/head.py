"""Medusa (Cai et al., 2024, arXiv 2401.10774): K independent heads on the last hidden state.

Where the target's own output head guesses the next token, head k guesses the k-th token after it:
residual blocks x + SiLU(W x + b) on the target's final hidden state, then an output projection.
"""

from typing import Literal, cast

import torch
from torch import nn
from torch.nn.functional import silu

from drafthead.core.settings import Count, settings
from drafthead.core.target.target import Target
from drafthead.heads.base import ForTraining, register_head
from drafthead.heads.families.sequential.head import SequentialHead
from drafthead.heads.growing.static import MEDUSA_PATHS
from drafthead.heads.objectives.losses import DepthDecay, LossName


@settings
class MedusaConfig:
    """Shape and loss of Medusa heads. Sizes are filled in from the target."""

    num_heads: Count = 4
    num_blocks: Count = 1
    output: Literal["own", "shared"] = "own"  # shared: the target's frozen output head
    bias: bool = True  # in the residual blocks
    loss: ForTraining[LossName] = "hard"  # a name in heads.objectives.losses.TOKEN_LOSSES
    depth_decay: ForTraining[DepthDecay] = 0.8  # head k's loss weighs depth_decay ** (k - 1)
    hidden_size: int = 0
    vocab_size: int = 0


class MedusaBranch(nn.Module):
    """One head: residual blocks and, unless it is shared, the projection to the vocabulary."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        size = config.hidden_size
        blocks = [nn.Linear(size, size, bias=config.bias) for _ in range(config.num_blocks)]
        for parameter in nn.ModuleList(blocks).parameters():
            # With zero weights a fresh head predicts what the target's output head predicts.
            nn.init.zeros_(parameter)
        self.blocks = nn.ModuleList(blocks)
        self.output = (
            nn.Linear(size, config.vocab_size, bias=False) if config.output == "own" else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The block outputs [..., D] that the projection reads."""
        for block in self.blocks:
            hidden = hidden + silu(block(hidden))
        return hidden


@register_head("medusa", MedusaConfig)
class MedusaHeads(SequentialHead):
    """K Medusa heads."""

    usual_paths = MEDUSA_PATHS

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.branches = nn.ModuleList(MedusaBranch(config) for _ in range(config.num_heads))

    def initialize(self, target: Target) -> None:
        weight = target.output_weight()
        for index in range(self.depth):
            output = self.branch(index).output
            if output is not None:
                output.weight.data.copy_(weight)

    def branch(self, index: int) -> MedusaBranch:
        """Head `index`, which guesses the token index + 1 places after the root."""
        return cast(MedusaBranch, self.branches[index])

    def token_logits(self, index: int, state: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [..., V] of head `index`, for the token index + 2 places after state [..., D]."""
        branch = self.branch(index)
        hidden = branch(state)
        if branch.output is None:
            return target.project(hidden)
        return target.finish_logits(branch.output(hidden))

    def all_logits(self, state: torch.Tensor, depth: int, target: Target) -> torch.Tensor:
        """Logits [B, d, V] of the first d heads from states [B, D]."""
        if self.config.output == "own":
            return torch.stack([self.token_logits(k, state, target) for k in range(depth)], dim=1)
        # The heads go through the shared output head together, so that it is read once.
        hidden = torch.stack([self.branch(k)(state) for k in range(depth)], dim=1)
        return target.project(hidden)

    def advance(
        self, state: torch.Tensor, tokens: torch.Tensor, index: int, target: Target
    ) -> torch.Tensor:
        """The states [..., D] as they are: all heads read that of the target at the anchor."""
        return state
