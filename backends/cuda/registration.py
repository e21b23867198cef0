"""Attention for transformers' models: the names under which they find it, and what it is given.

A model is run as ever, with this attention and three things of ours::

    with in_attention_of(target.config):
        target.model(..., attention_mask=sights(...), past_key_values=KernelCache(keys, values))

The model hands each layer the mask of its kind, which here says in a few numbers what each node
sees. A layer's `update` of the cache returns where its states are kept beside the new ones, and
the model hands that on to the attention unread.

Positions of a prompt that follow others need no kernel of ours, only no mask: see `attend_later`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from drafthead.backends.cuda.tree_attention import (
    WIDEST_HEAD,
    ancestor_bits,
    tree_attention,
)
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.column_cache import GrowingKeys
from drafthead.core.target.masks import LayerKind, LayerMasks, uses_alibi

NAME, LATER = "drafthead_tree", "drafthead_later"
TYPES = torch.bfloat16, torch.float16, torch.float32
# What models pass beside that makes no difference: what a window hides, the mask says already.
WITHOUT_EFFECT = {"sliding_window", "is_causal", "dropout", "position_ids", "use_cache"}


def sights(
    visible: torch.Tensor,  # [B or 1, N, M] bool: which of M pending and new nodes each of N sees
    lengths: torch.Tensor,  # [B] committed positions
    starts: torch.Tensor | None,  # [B] column of the first of the M nodes; None: the length
    kinds: tuple[LayerKind, ...],
) -> LayerMasks:
    """The mask of a pass over a tree, as the model takes it: one, or one for each kind of layer.

    Each is int64 [B, 1, 3 or 4, N]: the bits of the nodes that a node sees, its row's length and
    the tree's first column, and where a layer's reach is limited the first column that it sees.
    """
    starts = lengths if starts is None else starts
    masks = {kind.name: _sight(visible, lengths, starts, kind)[:, None] for kind in kinds}
    return masks if len(masks) > 1 else masks[kinds[0].name]


def _sight(
    visible: torch.Tensor,  # [B or 1, N, M]
    lengths: torch.Tensor,  # [B]
    starts: torch.Tensor,  # [B]
    kind: LayerKind,
) -> torch.Tensor:
    """Of one kind of layer, [B, 3 or 4, N]."""
    fields = [lengths[:, None], starts[:, None]]
    if kind.reach != float("inf"):
        # Of each node among those that another sees; the last is that of the other itself.
        positions = lengths[:, None, None] + visible.cumsum(-1) - 1  # [B, N, M]
        visible = visible & ~kind.hides(positions)
        fields.append(kind.first_seen(positions[..., -1]))
    shape = len(lengths), visible.shape[1]
    return torch.stack([f.long().expand(shape) for f in (ancestor_bits(visible), *fields)], dim=1)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, N, D]
    key: GrowingKeys,
    value: GrowingKeys,
    attention_mask: torch.Tensor,  # of `sights`
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [H]
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The attention [B, N, H, D] of one layer, as transformers' models call it.

    Raises UserError for keys of another cache, and for what the kernel does not know.
    """
    if not isinstance(key, GrowingKeys) or not isinstance(value, GrowingKeys):
        raise UserError(f"{type(module).__name__} has keys that are not of the tree's cache")
    refuse(module, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = query, key.cache, value.cache, key.new, value.new, attention_mask
    output = _operation(*given, scale, key.pending, softcap, s_aux)
    return output.unflatten(2, (query.shape[1], -1)), None


def refuse(module: torch.nn.Module, others: Mapping[str, object]) -> None:
    """Raise UserError where a layer asks its attention for more than is computed here."""
    asked = {n for n, v in others.items() if v is not None and v is not False} - WITHOUT_EFFECT
    if asked:
        names = ", ".join(sorted(asked))
        raise UserError(f"{type(module).__name__} has an attention with {names}: not supported")


def attend_later(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, C, D], of which the first S columns count
    value: torch.Tensor,  # as key
    attention_mask: torch.Tensor,  # of `later_mask`, [1, 1, 0, S]
    scaling: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The attention [B, T, H, D] of positions that are the last T of S, each to all up to itself.

    A mask [T, S] would rule out the kernels that skip what it hides. Raises UserError for what is
    not computed here.
    """
    refuse(module, others)
    new, end = query.shape[2], attention_mask.shape[-1]
    mixed = scaled_dot_product_attention(
        query,
        key[:, :, :end],
        value[:, :, :end],
        attn_mask=causal_lower_right(new, end),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2), None


def later_mask(end: int, device: torch.device) -> torch.Tensor:
    """The mask [1, 1, 0, S] that a model takes when its layers `attend_later` to S columns."""
    return torch.empty(1, 1, 0, end, dtype=torch.long, device=device)


@torch.library.custom_op("drafthead::tree_attention", mutates_args={"keys", "values"})
def _operation(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    sight: torch.Tensor,
    scale: float,
    pending: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The kernel as one operation, which compiled layers call and do not look into."""
    bits, lengths, starts, *first = sight.squeeze(1).unbind(1)
    return tree_attention(
        query,
        keys,
        values,
        new_keys,
        new_values,
        lengths[:, 0],
        bits,
        scale=scale,
        first=first[0] if first else None,
        starts=starts[:, 0],
        pending=pending,
        softcap=softcap,
        sinks=sinks,
    )


@_operation.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    """An output of the right shape."""
    batch, heads, nodes, head_size = query.shape
    return query.new_empty(batch, nodes, heads * head_size)


AttentionInterface.register(NAME, attend)
AttentionInterface.register(LATER, attend_later)


@contextmanager
def in_attention_of(config: PretrainedConfig, name: str = NAME) -> Iterator[None]:
    """Meanwhile models with this configuration call the attention of a name, `attend` unless
    given, and no other pass may run.
    """
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual


def reason_against(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    """The reason that a model's passes over trees cannot have this attention; None if they can.

    `config` is that of its decoder.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widest = max(size, getattr(config, "global_head_dim", None) or 0)
    reasons = {
        "it has an encoder": model.config.is_encoder_decoder,
        "it computes its attention by itself": not model._supports_attention_backend,
        "its attention adds a bias by position": uses_alibi(config),
        "its keys and values differ in width": getattr(config, "kv_lora_rank", None) is not None,
        f"its heads are wider than {WIDEST_HEAD}": widest > WIDEST_HEAD,
        f"its numbers are of the type {model.dtype}": model.dtype not in TYPES,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
