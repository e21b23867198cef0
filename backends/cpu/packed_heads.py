"""Draft heads that run our kernels: a twin of a head, with the same weights.

Products are of whole numbers of eight bits, as no guess changes an answer. Layers of ours are one
call, and so is a pass of an EAGLE-3 head. What is not known stays as it is: products, norms
and rotary positions may be anywhere in a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from drafthead.backends.cpu.kernels.operations import NORM_MULTIPLE
from drafthead.backends.cpu.packed_modules import (
    PackedLinear,
    PackedNorm,
    are_llamas_parts,
    children_in,
    layer_weights,
    norms_after,
    packed,
    with_same_weights,
)
from drafthead.core.kv_cache.column_cache import LayerColumns
from drafthead.heads.families.recurrent.eagle3 import Eagle3Head, Eagle3Layer
from drafthead.heads.layers.decoder_layer import (
    DecoderLayer,
    RMSNorm,
    Rotary,
    Rotation,
    Store,
)
from drafthead.heads.layers.draft_vocabulary import DraftVocabulary

ops = torch.ops.drafthead


class PackedAdding:
    """`DecoderLayer.added` in one call."""

    def __init__(self, layer: DecoderLayer, in_int8: bool):
        """For a layer of which `is_packable` holds."""
        self.usual, self.eps = layer.added, layer.post_attention_layernorm.eps
        self.scale = layer.self_attn.head_dim**-0.5
        self.weights = layer_weights(layer, weight_of(layer.input_layernorm), in_int8)

    def __call__(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        read: torch.Tensor,  # [B, T, K]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
        store: Store | None = None,
    ) -> torch.Tensor:
        """Compute `DecoderLayer.added`, in the usual way where keys and values go into no cache."""
        if not isinstance(store, LayerColumns) or mask is None:
            return self.usual(hidden, read, rotation, mask, store)
        cos, sin = (table.squeeze(1).to(hidden.dtype) for table in rotation)
        cached = store.cached
        states = [cached.keys[store.layer]], [cached.values[store.layer]], cached.columns
        how = self.weights, self.eps, self.scale, [0], read
        made: torch.Tensor = ops.decoder_layers(hidden, cos, sin, mask, *states, *how)[0]
        return made


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
        if isinstance(part, DecoderLayer) and is_packable(part):
            part.added = PackedAdding(part, in_int8)  # type: ignore[method-assign]
        for name, value in vars(part).items():
            if type(value) is Rotary and (2 * len(value.frequencies)) % NORM_MULTIPLE == 0:
                setattr(part, name, PackedRotary(value.frequencies, value.scaling))
    for parent, name, part in list(children_in(twin)):
        if (made := packed(part, in_int8)) is not None:
            parent._modules[name] = made
    for part in twin.modules():
        if isinstance(part, DraftVocabulary) and (ids := part.draft_ids) is not None:
            part.tokens_of = ids.take  # type: ignore[assignment, method-assign]
        if type(part) is Eagle3Head and is_one_call(part):
            part.in_one_call = pass_of(part)
    return twin


def pass_of(head: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`RecurrentHead.in_one_call`, of tensors [B, ...], for a twin that `is_one_call`."""
    first, norm, output, rotary = head.layers[0], head.norm, head.lm_head, head.rotary
    norms = first.input_layernorm.weight, first.hidden_norm.weight, norm.weight
    layers = [weight for layer in head.layers for weight in layer.added.weights]
    own = [*norms, rotary.frequencies, output.packed]
    sizes = output.out_features, norm.eps, first.added.scale, rotary.scaling
    forms = first.norm_before_residual, head.config.norm_feedback
    return partial(ops.eagle3_pass, layers, own, *sizes, *forms)


def is_one_call(head: Eagle3Head) -> bool:
    """Whether all parts of a twin are those of `eagle3_pass`, and no window hides columns."""
    layers: list[Any] = list(head.layers)
    norms = [head.norm, layers[0].hidden_norm, *(layer.input_layernorm for layer in layers)]
    return (
        all(isinstance(norm, PackedNorm) for norm in norms)
        and all(isinstance(layer.added, PackedAdding) for layer in layers)
        and len({part.eps for part in (*norms, *(layer.added for layer in layers))}) == 1
        and isinstance(head.lm_head, PackedLinear)
        and isinstance(head.rotary, PackedRotary)
        and not head.config.window
        and head.mask_hidden is None
    )


def weight_of(norm: nn.Module) -> torch.Tensor:
    """The weight [D] of a layer's first norm; without numbers where there is none."""
    return norm.weight if isinstance(norm, RMSNorm) else torch.empty(0, dtype=torch.bfloat16)


def is_packable(layer: DecoderLayer) -> bool:
    """Whether a layer is one of ours, of sizes and types of our kernels."""
    # Of a class of its own a layer may compute something else.
    if type(layer) not in (DecoderLayer, Eagle3Layer):
        return False
    norms: list[Any] = norms_after(layer)
    sizes = {(norm.eps, layer.self_attn.head_dim) for norm in norms}
    return are_llamas_parts(layer, norms) and len(sizes) == 1
