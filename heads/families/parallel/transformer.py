"""The transformer of a block-parallel head: all tokens of a block in one pass.

Its queries are the root and the mask tokens after it. Every layer attends to the block itself and
to keys and values made from the target's tapped hidden states of all tokens before the root
(DFlash, arXiv 2602.06036).
"""

from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import nn

from drafthead.core.errors import UserError
from drafthead.core.settings import FromZero, settings
from drafthead.core.target.target import Target
from drafthead.heads.layers.decoder_layer import DecoderLayer, LayerConfig, RMSNorm, Rotary, Store

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [B, Hkv, T, head_dim] each


@settings
class BlockConfig(LayerConfig):
    """Shape of a block transformer; what is 0 or empty is filled in from the target."""

    taps: tuple[int, ...] = ()  # layers whose outputs are the context, as in `FeatureSpec`
    tap_norm: bool = True  # norm each tap before they are joined, as EAGLE-3.1; DFlash does not
    num_layers: int = 2
    block_size: int = 6  # slots of a pass: the root and the mask tokens
    root_predicts: bool = True  # the root's slot drafts the first token; DFlash leaves it unused
    root_feature: bool = False  # the root's slot also reads the context vector before the root
    causal: bool = True  # slots see the slots before them; otherwise all of their block
    window: int = 0  # positions that a slot sees, its own and those before it; 0: all
    mask_token: FromZero | None = None  # whose embedding fills the others; None: a learnt vector

    def __post_init__(self) -> None:
        if self.depth < 1 or self.num_layers < 1:
            raise ValueError(
                f"block_size {self.block_size} and num_layers {self.num_layers} leave nothing to "
                "draft with"
            )
        if len(set(self.taps)) < len(self.taps) or min(self.taps, default=0) < -1:
            raise ValueError(f"taps must be different layers from -1 on, got {list(self.taps)}")
        if 0 < self.window < self.block_size or self.window < 0:
            raise ValueError(
                f"window must be 0 or hold a block of {self.block_size}, got {self.window}"
            )

    @property
    def depth(self) -> int:
        """Number K of tokens that one pass drafts."""
        return self.block_size if self.root_predicts else self.block_size - 1

    def like(self, target: Target) -> Self:
        """This configuration with everything that it leaves open taken from the target.

        Raises UserError for taps or a mask token that the target does not have.
        """
        if max(self.taps, default=0) > target.num_layers:
            raise UserError(
                f"head.taps is {list(self.taps)}, but the target has layers 0 to "
                f"{target.num_layers - 1}"
            )
        if self.mask_token is not None and self.mask_token >= target.vocab_size:
            raise UserError(
                f"head.mask_token is {self.mask_token}, but the target has {target.vocab_size} "
                "tokens"
            )
        return super().like(target)


def spread_taps(num_layers: int, count: int = 4) -> tuple[int, ...]:
    """About `count` layers, the last one included: 3 6 9 13 of 14, and 0 1 of 2."""
    return tuple(sorted({(num_layers - 1) * i // count for i in range(1, count + 1)}))


class BlockTransformer(nn.Module):
    """Context features -> keys and values; roots -> hidden states of their blocks."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        norms = (RMSNorm(size, eps=eps) if config.tap_norm else nn.Identity() for _ in config.taps)
        self.tap_norms = nn.ModuleList(norms)
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=eps)
        own_mask = config.mask_token is None
        self.mask = nn.Parameter(0.02 * torch.randn(size)) if own_mask else None
        self.root_proj = None
        if config.root_feature:
            self.root_proj = nn.Linear(size, size, bias=False)
            nn.init.zeros_(self.root_proj.weight)
        layers = [DecoderLayer(config, qk_norm=True) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary.of(config)

    @torch.no_grad()
    def begin_like(self, target: Target) -> None:
        """Copy the target's last layers, as far as they have the same parts.

        The context starts as the last tap alone.
        """
        originals = list(target.layers.children())[-len(self.layers) :]
        for layer, original in zip(reversed(self.layers), reversed(originals), strict=False):
            theirs = original.state_dict()
            for name, ours in layer.state_dict().items():
                if name in theirs and theirs[name].shape == ours.shape:
                    ours.copy_(theirs[name])
        size = self.config.hidden_size
        self.fc.weight.zero_()[:, -size:].fill_diagonal_(1)
        first = cast(DecoderLayer, self.layers[0])
        self.hidden_norm.load_state_dict(first.input_layernorm.state_dict())

    def fused(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """One vector [B, T, D] for each token from its tapped features [B, T, D]."""
        normed = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
        return self.hidden_norm(self.fc(torch.cat(normed, dim=-1)))

    def context(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """Each layer's keys and values for fused features [B, T, D] at positions [B, T]."""
        rotation = self.rotary(positions)
        return [
            cast(DecoderLayer, layer).self_attn.keys_values(hidden, rotation)
            for layer in self.layers
        ]

    def forward(
        self,
        target: Target,
        roots: torch.Tensor,  # [B, A]
        before: torch.Tensor,  # [B, A, D] fused features before the roots
        positions: torch.Tensor,  # [B, A]
        mask: torch.Tensor,  # [B or 1, 1, A x block_size, S] bool
        stores: Sequence[Store],
    ) -> torch.Tensor:
        """Hidden states [B, A, K, D], one for each token that A blocks a row draft.

        A layer's store takes the keys and values of all slots and returns those of the S columns
        of the mask.
        """
        size = self.config.block_size
        slots = torch.arange(size, device=roots.device)
        rotation = self.rotary((positions[..., None] + slots).flatten(1))
        first = target.embed(roots).to(before.dtype)
        if self.root_proj is not None:
            first = first + self.root_proj(before)
        others = self._mask_vector(target).expand(*roots.shape, size - 1, -1)
        hidden = torch.cat([first[:, :, None], others], dim=2).flatten(1, 2)
        for layer, store in zip(self.layers, stores, strict=True):
            hidden = layer(hidden, rotation, mask, store)
        blocks = self.norm(hidden).view(hidden.shape[0], -1, size, hidden.shape[-1])
        return blocks[:, :, size - self.config.depth :]

    def _mask_vector(self, target: Target) -> torch.Tensor:
        if self.mask is not None:
            return self.mask
        assert self.config.mask_token is not None
        # Filled on the device: a number copied there could not be recorded.
        token = torch.full((), self.config.mask_token, device=self.norm.weight.device)
        return target.embed(token).to(self.norm.weight.dtype)

    def in_window(self, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The mask [B, A x block_size, S], of roots at positions [B, A], cut to the window.

        Columns of the context are numbered as positions; those of the block come later. A causal
        block of two after five positions, by a window of 3, sees::

            . . . 1 1 1 .
            . . . . 1 1 1
        """
        if self.config.window == 0:
            return mask
        slots = torch.arange(self.config.block_size, device=mask.device)
        oldest = (positions[..., None] + slots).flatten(1) - self.config.window + 1
        columns = torch.arange(mask.shape[-1], device=mask.device)
        return mask & (columns >= oldest[..., None])

    def visible(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """A mask of the slots that slots see, [A x block_size, A x block_size]: their own block's.

        Two causal blocks of two slots::

            1 . . .
            1 1 . .
            . . 1 .
            . . 1 1
        """
        size = self.config.block_size
        inside = torch.ones(size, size, dtype=torch.bool, device=device)
        blocks = torch.arange(num_blocks * size, device=device) // size
        within = inside.tril() if self.config.causal else inside
        return within.repeat(num_blocks, num_blocks) & (blocks[:, None] == blocks)
