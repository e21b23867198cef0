"""EAGLE-3 (Li et al., 2025, arXiv 2503.01840): a draft layer on low, middle and high features.

No loss ties its states to the target's, so the head learns on its own outputs instead: the
training-time test of `head.Unrolled`. It may guess among the frequent tokens only. The norms
of EAGLE-3.1 ("Attention Drift", arXiv 2605.09992) keep the states that are fed back from growing.
P-EAGLE (arXiv 2602.01469) feeds nothing back: one pass over mask tokens drafts all depths.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from drafthead.core.errors import UserError
from drafthead.core.settings import settings
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.base import register_head
from drafthead.heads.families.recurrent.head import RecurrentConfig, RecurrentHead
from drafthead.heads.layers.decoder_layer import (
    DecoderLayer,
    RMSNorm,
    Rotation,
    Store,
)


@settings
class Eagle3Config(RecurrentConfig):
    """Shape and training of an EAGLE-3 head.

    `tap_norm` each and `norm_feedback` are EAGLE-3.1; EAGLE-3 has neither. A hidden size other than
    the target's needs embeddings of its own. With `mask_token` the head is P-EAGLE: drafted
    positions read this token and learnt taps instead of the drafted token and the last output.
    """

    target_hidden_size: int = 0
    taps: tuple[int, ...] = ()  # layers of the target whose OUTPUT is read, see `FeatureSpec`
    tap_norm: Literal["none", "each", "joint"] = "each"  # joint: over all taps as one vector
    norm_feedback: bool = True  # feed back the state after the final norm
    norm_before_residual: bool = False  # the first layer adds to the normed state
    qk_norm: bool = False  # norm queries and keys of each attention head, as Qwen3 does
    embeddings: Literal["target", "own"] = "target"  # own: as large as the target's
    mask_token: int | None = None
    output: Literal["own", "sliced"] = "own"  # sliced: the target's rows, not trained
    draft_vocab_size: int = 0  # most frequent tokens to guess among; 0: the whole vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))  # JSON brings a list
        if self.mask_token is not None and not 0 <= self.mask_token < (self.vocab_size or 2**31):
            raise UserError(
                f"head.mask_token is {self.mask_token}, which is no token of a vocabulary of "
                f"{self.vocab_size}"
            )
        if self.vocab_size and self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"head.draft_vocab_size is {self.draft_vocab_size}, but the vocabulary has "
                f"{self.vocab_size} tokens"
            )
        other_width = self.target_hidden_size not in (0, self.hidden_size)
        if self.output == "sliced" and other_width:
            raise UserError(
                f"head.output sliced needs the target's hidden size {self.target_hidden_size}, "
                f"but head.hidden_size is {self.hidden_size}"
            )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers of which EAGLE-3 reads the output: low, middle and high.

    Its authors name the layers whose INPUT they read, 2, L/2 and L - 3; one less is the layer of
    which that is the output: 1, 3, 4 of 8 layers. Below 7 layers these coincide, and first, middle
    and last are taken.
    """
    if num_layers >= 7:
        return (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(sorted({0, num_layers // 2, num_layers - 1}))


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads embedding and state side by side.

    So its projections are twice as wide, while the residual path carries the state alone.
    """

    def __init__(self, config: Eagle3Config):
        size = config.hidden_size
        super().__init__(config, qk_norm=config.qk_norm, input_size=2 * size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(size, eps=config.rms_norm_eps)

    def forward(  # type: ignore[override]  # reads two inputs
        self,
        embeds: torch.Tensor,  # [B, T, D]
        states: torch.Tensor,  # [B, T, D]
        rotation: Rotation,
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool
        store: Store,
    ) -> torch.Tensor:
        """The new states [B, T, D]."""
        return self.added(*self.inputs(embeds, states), rotation, mask, store)

    def inputs(  # type: ignore[override]  # of two inputs
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, T, D], and embeddings and states side by side [B, T, 2D], after norms."""
        normed = self.hidden_norm(states)
        joined = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return normed if self.norm_before_residual else states, joined


@register_head("eagle3", Eagle3Config)
class Eagle3Head(RecurrentHead):
    """EAGLE-3's head, with or without the norms of 3.1."""

    def __init__(self, config: Eagle3Config):
        super().__init__(config, config.draft_vocab_size)
        size, eps, num_taps = config.hidden_size, config.rms_norm_eps, len(config.taps)
        width = config.target_hidden_size
        if config.tap_norm == "each":
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(num_taps))
        elif config.tap_norm == "joint":
            self.input_norm = RMSNorm(num_taps * width, eps=eps)
        self.fc = nn.Linear(num_taps * width, size, bias=False)
        more = (DecoderLayer(config, qk_norm=config.qk_norm) for _ in range(config.num_layers - 1))
        self.layers = nn.ModuleList([Eagle3Layer(config), *more])
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)
        self.lm_head.requires_grad_(config.output == "own")
        own_embeddings = config.embeddings == "own" or size != width
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embeddings else None
        self.mask_hidden = None
        if config.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, num_taps * width))

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        """The configuration with the target's sizes, but for the width, which may be another."""
        filled = super().sized(replace(config, hidden_size=0, output="own"), target)
        return replace(
            filled,
            hidden_size=config.hidden_size or target.hidden_size,
            target_hidden_size=target.hidden_size,
            taps=config.taps or default_taps(target.num_layers),
            output=config.output,
        )

    @property
    def features_needed(self) -> FeatureSpec:
        return FeatureSpec(layers=self.config.taps, last=True)

    def initialize(self, target: Target) -> None:
        """Copy the target's output head, if it fits, and have it guess nearly evenly at first.

        By the scale of the target's final norm, outputs that know nothing yet would be sure of
        random tokens, and the first steps would go into unlearning that.
        """
        if self.config.hidden_size != self.config.target_hidden_size:
            return
        self.copy_embeddings(target)
        weight = target.output_weight()
        ids = self.draft_ids
        rows = weight if ids is None else weight[ids.to(weight.device)]
        self.lm_head.weight.data.copy_(rows)
        # Normed outputs of D random numbers then have logits of variance 1.
        lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
        self.norm.weight.data.copy_(lengths.square().mean().rsqrt())

    def encode(self, features: Features) -> torch.Tensor:
        """One vector [B, T, D] of all taps, after the norms that come before them."""
        taps: tuple[torch.Tensor, ...] = features.taps
        if self.config.tap_norm == "each":
            taps = tuple(norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True))
        joined = torch.cat(taps, dim=-1)
        return self.fc(self.input_norm(joined) if self.config.tap_norm == "joint" else joined)

    def next_states(self, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs [..., D], normed where the configuration says so."""
        return self.norm(outputs) if self.config.norm_feedback else outputs

    def draft_inputs(
        self, token_ids: torch.Tensor, outputs: torch.Tensor, target: Target
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and states [..., D] of drafted nodes; P-EAGLE has a mask and learnt taps."""
        if self.mask_hidden is None:
            return super().draft_inputs(token_ids, outputs, target)
        mask = torch.full_like(token_ids, self.config.mask_token)
        taps = self.mask_hidden.chunk(len(self.config.taps), dim=-1)
        return self.embed(mask, target), self.encode(Features(None, taps)).expand_as(outputs)

    @property
    def drafts_blindly(self) -> bool:
        return self.mask_hidden is not None

    def logits(self, outputs: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [..., Vd] of outputs [..., D] by the output head of this head."""
        return target.finish_logits(self.lm_head(self.norm(outputs)))
