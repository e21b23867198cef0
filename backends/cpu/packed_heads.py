"""Draft heads that run our kernels: a twin of a head, with the same weights.

Products are of whole numbers of eight bits, as no guess changes an answer. Layers of ours are one
call, whatever they make of what they read first. What is not known stays as it is: products, norms
and rotary positions may be anywhere in a head.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from drafthead.backends.cpu.kernels.operations import LAYER_WEIGHTS, NORM_MULTIPLE
from drafthead.backends.cpu.packed_modules import (
    are_llamas_parts,
    children_in,
    layer_weights,
    norms_after,
    packed,
    with_same_weights,
)
from drafthead.core.kv_cache.column_cache import LayerColumns
from drafthead.heads.families.recurrent.eagle3 import Eagle3Layer
from drafthead.heads.families.recurrent.head import RecurrentHead
from drafthead.heads.layers.decoder_layer import (
    DecoderLayer,
    RMSNorm,
    Rotary,
    Rotation,
    Store,
    StoreOf,
)

ops = torch.ops.drafthead


class PackedAdding:
    """`DecoderLayer.added` in one call, and the layers that follow."""

    def __init__(self, layers: Sequence[DecoderLayer], in_int8: bool):
        """For layers of which `are_packable` holds."""
        self.inputs, self.usual = layers[0].inputs, layers[0].added
        self.eps = layers[0].post_attention_layernorm.eps
        self.scale = layers[0].self_attn.head_dim ** -0.5
        self.weights = [
            weight
            for layer in layers
            for weight in layer_weights(layer, weight_of(layer.input_layernorm), in_int8)
        ]

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
        cached = store.cached
        own = slice(store.layer, store.layer + len(self.weights) // LAYER_WEIGHTS)
        states = list(cached.keys[own]), list(cached.values[own]), cached.columns
        how = self.weights, self.eps, self.scale, read
        made: torch.Tensor = ops.decoder_layers(hidden, cos, sin, mask, *states, *how)
        return made

    def all_layers(
        self,
        inputs: Sequence[torch.Tensor],  # [B, T, D] each, of the first layer
        rotation: Rotation,
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool
        store_of: StoreOf,
    ) -> torch.Tensor:
        """The outputs [B, T, D] of all layers, see `RecurrentHead.in_one_call`."""
        return self(*self.inputs(*inputs), rotation, mask, store_of(0))


class PackedRotary(Rotary):
    """Rotary positions by our kernel."""

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """The rotation of positions [B, T], in bfloat16."""
        cos, sin = ops.rotations(positions, self.frequencies, self.scaling)
        return cos[:, None], sin[:, None]


def packed_head(head: Any, in_int8: bool = True) -> Any:
    """A twin of a `DraftHead` that runs our kernels where it can, with the same weights."""
    twin = with_same_weights(head)
    for part in list(twin.modules()):
        if isinstance(part, RecurrentHead) and are_packable(part.layers):
            part.in_one_call = PackedAdding(list(part.layers), in_int8).all_layers  # type: ignore
        elif isinstance(part, DecoderLayer) and are_packable([part]):
            part.added = PackedAdding([part], in_int8)  # type: ignore[method-assign]
        for name, value in vars(part).items():
            if type(value) is Rotary and (2 * len(value.frequencies)) % NORM_MULTIPLE == 0:
                setattr(part, name, PackedRotary(value.frequencies, value.scaling))
    for parent, name, part in list(children_in(twin)):
        if (made := packed(part, in_int8)) is not None:
            parent._modules[name] = made
    return twin


def weight_of(norm: nn.Module) -> torch.Tensor:
    """The weight [D] of a layer's first norm; without numbers where there is none."""
    return norm.weight if isinstance(norm, RMSNorm) else torch.empty(0, dtype=torch.bfloat16)


def are_packable(layers: Iterable[nn.Module]) -> bool:
    """Whether layers are ours, of sizes and types of our kernels, and alike but for their weights;
    the inputs of the first one may be of any form.
    """
    kinds = set()
    for index, layer in enumerate(layers):
        # Of a class of its own a layer may compute something else.
        if type(layer) is not DecoderLayer and (index or type(layer) is not Eagle3Layer):
            return False
        assert isinstance(layer, DecoderLayer)
        norms: list[Any] = norms_after(layer) + ([layer.input_layernorm] if index else [])
        if not are_llamas_parts(layer, norms):
            return False
        kinds |= {(norm.eps, layer.self_attn.head_dim) for norm in norms}
    return len(kinds) == 1
