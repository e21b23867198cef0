"""The kernels that run on a CPU instead of functions of ours: see the table `KERNELS`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drafthead.backends.cpu.kernels.operations import LARGEST_HEAD
from drafthead.core import sampling
from drafthead.core.kv_cache.column_cache import additive, move_columns, visible_columns
from drafthead.core.trees.tree import TreeTables
from drafthead.heads.growing import dynamic
from drafthead.heads.growing.dynamic import Growth, Opened


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
    """Whether there is a mask, and the kernel takes heads of these sizes, padded with zeros."""
    fits = max(query.shape[-1], value.shape[-1]) <= LARGEST_HEAD
    return attn_mask is not None and fits and query.dtype == torch.bfloat16


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


def opened(growth: Growth, slots: torch.Tensor, width: int) -> Opened:
    """`dynamic.open_level`, for `slots` [n], by our kernel."""
    known = growth.scores, growth.tokens, *growth[3:]
    return Opened(*torch.ops.drafthead.open_level(*known, len(slots), width))


def extended(
    growth: Growth,
    opened: torch.Tensor,  # [B, n]
    log_probs: torch.Tensor,  # [B, n, k]
    tokens: torch.Tensor,  # [B, n, k]
) -> Growth:
    """`dynamic.with_children` by our kernel."""
    scores, ids, parents = torch.ops.drafthead.with_children(*growth[:3], opened, log_probs, tokens)
    return growth._replace(scores=scores, tokens=ids, parents=parents, opened=opened)


def chosen(growth: Growth, slots: torch.Tensor, levels: int) -> TreeTables:
    """`dynamic.best_tree`, for `slots` [N], by our kernel."""
    return TreeTables(*torch.ops.drafthead.best_tree(*growth[:3], len(slots)))


KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    sampling.largest: kernel("largest_logits"),
    move_columns: kernel("move_columns"),
    visible_columns: kernel("visible_columns"),
    dynamic.open_level: opened,
    dynamic.with_children: extended,
    dynamic.best_tree: chosen,
}
