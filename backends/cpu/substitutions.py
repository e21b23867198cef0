"""What runs instead of operations on a CPU: our kernels, and in passes that torch compiles.

`SUBSTITUTIONS`, at the end, is the table: operation, replacement, condition.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from drafthead.backends.cpu.kernels.operations import LARGEST_HEAD, NORM_MULTIPLE
from drafthead.core import sampling
from drafthead.core.kv_cache.column_cache import additive, move_columns, visible_columns
from drafthead.core.substitution import Substitution
from drafthead.core.trees.tree import TreeTables
from drafthead.heads.growing import dynamic
from drafthead.heads.growing.dynamic import Candidates, Opened


def replacement_of(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel for an operation, where there is one, or else the operation itself."""
    return KERNELS.get(operation, operation)


def can_be_packed(
    input: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
) -> bool:
    """Whether bfloat16 weights stay as they are, with values that are multiplied in pairs."""
    are_pairs = input.dtype == weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return isinstance(weight, nn.Parameter) and are_pairs


def has_our_products(module: nn.Module) -> bool:
    """Whether our kernels multiply by the matrices of a module itself; embeddings are looked up."""
    if isinstance(module, nn.Embedding):
        return True
    is_linear = isinstance(module, nn.Linear)
    matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    return all(is_linear and can_be_packed(weight, weight) for weight in matrices)


def has_mask(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether there is a mask, and the kernel takes queries of this size."""
    size = query.shape[-1]
    fits = size % NORM_MULTIPLE == 0 and size <= LARGEST_HEAD
    return attn_mask is not None and fits and query.dtype == torch.bfloat16


def attention(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D], H a multiple of G
    value: torch.Tensor,  # [B, G, S, D]
    attn_mask: torch.Tensor | None = None,  # [B, 1 or H, T, S] bool, or added to the scores
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention [B, H, T, D] with torch's arguments, by torch."""
    mask = None if attn_mask is None else added(attn_mask, query.dtype)
    scale = scale or query.shape[-1] ** -0.5
    # torch works through blocks of queries: with one query, its time grows five times as fast with
    # the number of keys.
    if query.shape[2] == 1:
        return attention_of_one(query, key, value, mask, scale, enable_gqa)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def attention_of_one(
    query: torch.Tensor,  # [B, H, 1, D]
    key: torch.Tensor,  # [B, G, S, D], H a multiple of G
    value: torch.Tensor,  # [B, G, S, D]
    mask: torch.Tensor | None,  # [B, 1 or H, 1, S] added to the scores
    scale: float,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(query key^T scale + mask) value [B, H, 1, D]."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def added(
    mask: torch.Tensor,  # [B, 1 or H, T, S] bool, True where keys are visible, or already added
    dtype: torch.dtype,
) -> torch.Tensor:
    """The mask in the form that is added to the scores."""
    return additive(mask, dtype) if mask.dtype == torch.bool else mask


def kernel(name: str) -> Callable[..., Any]:
    """Our kernel of that name, which takes the arguments of the operation."""

    def call(*arguments: Any) -> Any:
        # Looked up at the call: torch knows it only where the kernels have been imported.
        return getattr(torch.ops.drafthead, name)(*arguments)

    return call


def opened(
    nodes: Candidates,
    outputs: torch.Tensor,  # [B, F, D]
    visible: torch.Tensor | None,  # [B, F, P]
    slots: torch.Tensor,  # [n]
    width: int,
) -> Opened:
    """`dynamic.open_level` by our kernel."""
    known = nodes.scores, nodes.tokens, nodes.opened, outputs, visible
    return Opened(*torch.ops.drafthead.open_level(*known, len(slots), width))


def extended(
    nodes: Candidates,
    opened: torch.Tensor,  # [B, n]
    log_probs: torch.Tensor,  # [B, n, k]
    tokens: torch.Tensor,  # [B, n, k]
) -> Candidates:
    """`dynamic.with_children` by our kernel."""
    scores, ids, parents = torch.ops.drafthead.with_children(*nodes[:3], opened, log_probs, tokens)
    return Candidates(scores, ids, parents, opened)


def chosen(nodes: Candidates, slots: torch.Tensor, levels: int) -> TreeTables:
    """`dynamic.best_tree`, for `slots` [N], by our kernel."""
    return TreeTables(*torch.ops.drafthead.best_tree(*nodes[:3], len(slots)))


def always(*_: Any, **__: Any) -> bool:
    """For all arguments."""
    return True


# In passes that torch compiles for a CPU.
ATTENTION = [Substitution(functional.scaled_dot_product_attention, attention, always)]
# Where our kernels run.
KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    sampling.draw: kernel("draw"),
    sampling.largest: kernel("largest_logits"),
    move_columns: kernel("move_columns"),
    visible_columns: kernel("visible_columns"),
    dynamic.open_level: opened,
    dynamic.with_children: extended,
    dynamic.best_tree: chosen,
}
