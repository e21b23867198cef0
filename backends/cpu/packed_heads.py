"""Draft heads that run our kernels: a twin of a head, with the same weights.

Products read packed weights, in bytes: half as much, and about two digits of each weight, as no
guess changes an answer. Layers of ours are one call, whatever they make of what they read first.
What is not known stays as it is: products, norms and rotary positions may be anywhere in a head.
"""

from typing import Any

import torch

from drafthead.backends.cpu.packed_modules import (
    are_llamas_parts,
    children_in,
    layer_weights,
    norms_after,
    packed,
    with_same_weights,
)
from drafthead.backends.cpu.kernels.operations import NORM_MULTIPLE
from drafthead.core.kv_cache.column_cache import LayerColumns
from drafthead.heads.layers.decoder_layer import DecoderLayer, Rotary, Rotation, Store

ops = torch.ops.drafthead


class PackedAdding:
    """`DecoderLayer.added` in one call."""

    def __init__(self, layer: DecoderLayer):
        """For a layer of which `is_packable` holds."""
        self.usual = layer.added
        self.eps, self.scale = layer.post_attention_layernorm.eps, layer.self_attn.head_dim**-0.5
        weight = layer.post_attention_layernorm.weight
        self.weights = layer_weights(layer, weight.new_empty(0), in_bytes=True)

    def __call__(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        read: torch.Tensor,  # [B, T, K]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
        store: Store | None = None,
    ) -> torch.Tensor:
        """As `DecoderLayer.added`; the usual way where keys and values go into no cache."""
        if not isinstance(store, LayerColumns) or mask is None:
            return self.usual(hidden, read, rotation, mask, store)
        cos, sin = (table.squeeze(1).to(hidden.dtype) for table in rotation)
        cached, number = store.cached, store.layer
        states = [cached.keys[number]], [cached.values[number]], cached.columns
        how = self.weights, self.eps, self.scale, read
        made: torch.Tensor = ops.decoder_layers(hidden, cos, sin, mask, *states, *how)
        return made


class PackedRotary(Rotary):
    """Rotary positions by our kernel."""

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """The rotation of positions [B, T], in bfloat16."""
        cos, sin = ops.rotations(positions, self.frequencies, self.scaling)
        return cos[:, None], sin[:, None]


def packed_head(head: Any) -> Any:
    """A twin of a `DraftHead` that runs our kernels where it can, with the same weights."""
    twin = with_same_weights(head)
    for part in list(twin.modules()):
        if isinstance(part, DecoderLayer) and is_packable(part):
            part.added = PackedAdding(part)  # type: ignore[method-assign]
        for name, value in vars(part).items():
            if isinstance(value, Rotary) and (2 * len(value.frequencies)) % NORM_MULTIPLE == 0:
                setattr(part, name, PackedRotary(value.frequencies, value.scaling))
    for parent, name, part in list(children_in(twin)):
        if (made := packed(part, in_bytes=True)) is not None:
            parent._modules[name] = made
    return twin


def is_packable(layer: DecoderLayer) -> bool:
    """Whether a layer of ours, but for its input's norms, is of sizes and types of our kernels."""
    norms = norms_after(layer)
    return are_llamas_parts(layer, norms) and len({norm.eps for norm in norms}) == 1
