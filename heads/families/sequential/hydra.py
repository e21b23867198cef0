"""Hydra (Ankner et al., 2024, arXiv 2402.05109): heads that see the tokens drafted before theirs.

Head k reads the target's hidden state and the embeddings of the root and of the k - 1 tokens
drafted after it. Hydra++ puts a decoder layer, the prefix layer, between target and heads.
"""

from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import silu

from drafthead.core.kv_cache.column_cache import CacheColumns, FreshMemory
from drafthead.core.settings import Count, settings
from drafthead.core.target.target import Target
from drafthead.heads.base import ForTraining, register_head
from drafthead.heads.families.sequential.head import SequentialHead
from drafthead.heads.growing.static import MEDUSA_PATHS
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.layers.decoder_layer import DecoderLayer, LayerConfig, Rotary
from drafthead.heads.layers.segments import seen_in_segments
from drafthead.heads.objectives.losses import DepthDecay, LossName


@settings
class HydraConfig(LayerConfig):
    """Shape and loss of Hydra heads; the layer's shape is that of the prefix layer.

    The defaults are Hydra++. Hydra is prefix_layer false, num_blocks 1 and loss hard.
    """

    num_heads: Count = 4
    num_blocks: Count = 4  # after a head's first, one block is applied num_blocks - 1 times
    prefix_layer: bool = True
    grounded: bool = True  # false: the heads see no drafted tokens, as Medusa's
    # Before every block and output; 0.2 in the paper's 10 epochs.
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    loss: ForTraining[LossName] = "soft"  # a name in heads.objectives.losses.TOKEN_LOSSES
    depth_decay: ForTraining[DepthDecay] = 1.0  # head k's loss weighs depth_decay ** (k - 1)
    vocab_size: int = 0


class HydraBranch(nn.Module):
    """One head: a block that reads the whole state, a repeated residual block, and the output."""

    def __init__(self, config: HydraConfig, index: int):
        super().__init__()
        size = config.hidden_size
        width = size * (index + 2) if config.grounded else size
        self.dropout = nn.Dropout(config.dropout)
        self.first = nn.Linear(width, size)
        self.shortcut = nn.Linear(width, size) if config.grounded else nn.Identity()
        self.block = nn.Linear(size, size) if config.num_blocks > 1 else None
        self.repeats = config.num_blocks - 1
        self.output = nn.Linear(size, config.vocab_size)
        # A fresh head without prefix layer predicts what the target's output head predicts.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if isinstance(self.shortcut, nn.Linear):
            nn.init.eye_(self.shortcut.weight)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] from the hidden state and the tokens after it, [..., width]."""
        state = self.dropout(state)
        hidden = self.shortcut(state) + silu(self.first(state))
        for _ in range(self.repeats):
            hidden = self.dropout(hidden)
            assert self.block is not None
            hidden = hidden + silu(self.block(hidden))
        return self.output(self.dropout(hidden))


class PrefixLayer(nn.Module):
    """A decoder layer over the target's hidden states, and a norm."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.layer = DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary.of(config)
        for output in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(output.weight)  # a fresh layer passes on its input

    def train_pass(self, hidden: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Outputs [B, T, D] of packed rows; each segment [B, T] sees itself alone."""
        mask = seen_in_segments(segments)[:, None]
        # Rotary positions are relative, so they need not restart with each segment.
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.norm(self.layer(hidden, self.rotary(positions), mask))


@register_head("hydra", HydraConfig)
class HydraHeads(SequentialHead):
    """K Hydra heads. A state is the hidden state and the embeddings of the path after it."""

    usual_paths = MEDUSA_PATHS

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        self.prefix = PrefixLayer(config) if config.prefix_layer else None
        self.branches = nn.ModuleList(HydraBranch(config, i) for i in range(config.num_heads))

    @classmethod
    def sized(cls, config: HydraConfig, target: Target) -> Any:
        sized = super().sized(config, target)
        return sized.like(target) if config.prefix_layer else sized

    def initialize(self, target: Target) -> None:
        weight = target.output_weight()
        for index in range(self.depth):
            self.branch(index).output.weight.data.copy_(weight)

    def branch(self, index: int) -> HydraBranch:
        """Head `index`, which guesses the token index + 1 places after the root."""
        return cast(HydraBranch, self.branches[index])

    def contexts(self, hidden: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, T, D], after the prefix layer if there is one."""
        return hidden if self.prefix is None else self.prefix.train_pass(hidden, segments)

    def new_cache(self, rows: int, memory: FreshMemory) -> DraftCache | None:
        return None if self.prefix is None else DraftCache([self.prefix.layer], rows, memory)

    def read(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        positions: torch.Tensor,  # [B or 1, T]
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool
        cached: CacheColumns,
    ) -> torch.Tensor:
        prefix = self.prefix
        assert prefix is not None
        rotation = prefix.rotary(positions)
        return prefix.norm(prefix.layer(hidden, rotation, mask, cached.of_layer(0)))

    def advance(
        self, state: torch.Tensor, tokens: torch.Tensor, index: int, target: Target
    ) -> torch.Tensor:
        """The parents' states [..., S], followed by the embeddings of the nodes' tokens [...]."""
        if not self.config.grounded:
            return state
        return torch.cat([state, target.embed(tokens).to(state.dtype)], dim=-1)

    def token_logits(self, index: int, state: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [..., V] of head `index` from state [..., (index + 2) D]; ungrounded [..., D]."""
        return target.finish_logits(self.branch(index)(state))
