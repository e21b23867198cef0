"""What compiled passes on a CPU run instead of operations that can be faster, and where.

`SUBSTITUTIONS`, at the end, is the table: operation, replacement, condition.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from drafthead.backends.cpu.kernels.operations import LARGEST_HEAD, MOST, NORM_MULTIPLE
from drafthead.backends.cpu.kernels.packing import packed_once
from drafthead.core import sampling
from drafthead.core.kv_cache.column_cache import additive, move_columns, visible_columns
from drafthead.core.substitution import Substituting, Substitution
from drafthead.core.target.seven_bits import MULTIPLE
from drafthead.core.trees.tree import TreeTables
from drafthead.heads.growing import dynamic
from drafthead.heads.growing.dynamic import Candidates, Opened


class CpuKernels(Substituting):
    """Replaces torch's operations within it; those of our own are replaced by `replacement_of`."""

    def __init__(self, has_kernels: bool, in_bytes: bool):
        """With `has_kernels`, replacements that are our kernels can be compiled; they read weights
        as bytes, which are less exact, if `in_bytes`.
        """
        rows = (IN_BYTES, *SUBSTITUTIONS) if in_bytes else SUBSTITUTIONS
        super().__init__([row for row in rows if has_kernels or not row.is_kernel])


def replacement_of(operation: Callable[..., Any], has_kernels: bool) -> Callable[..., Any]:
    """Our kernel for an operation, where there are any, or else the operation itself."""
    kernels = {row.operation: row.replacement for row in SUBSTITUTIONS}
    return kernels.get(operation, operation) if has_kernels else operation


def packed_linear(
    input: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    in_bytes: bool = False,
) -> torch.Tensor:
    """input weight^T + bias [..., N], from packed weights."""
    if torch.compiler.is_compiling():
        packed = torch.ops.drafthead.pack([weight], False, in_bytes)
    else:
        packed = packed_once(weight, in_bytes)
    return torch.ops.drafthead.linear(input, packed, weight.shape[0], bias)


def can_be_packed(
    input: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
) -> bool:
    """Whether bfloat16 weights stay as they are, with values that are multiplied in pairs."""
    are_pairs = input.dtype == weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return isinstance(weight, nn.Parameter) and are_pairs


def can_be_bytes(
    input: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
) -> bool:
    """Whether weights that can be packed can be packed in bytes."""
    return can_be_packed(input, weight, bias) and weight.shape[1] % MULTIPLE == 0


def has_our_products(module: nn.Module) -> bool:
    """Whether our kernels multiply by the matrices of a module itself; embeddings are looked up."""
    if isinstance(module, nn.Embedding):
        return True
    is_linear = isinstance(module, nn.Linear)
    matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    return all(is_linear and can_be_packed(weight, weight) for weight in matrices)


def top_few(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of x [..., V] and their places, both [..., k], as `x.topk(k)` returns them."""
    places = torch.ops.drafthead.top(x, k)
    return x.gather(-1, places), places


def are_few(x: torch.Tensor, k: int, dim: int = -1) -> bool:
    """Whether there is a kernel for the k largest of x [..., V]."""
    return x.dtype == torch.float32 and dim == -1 and k <= MOST


def attend(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D], H a multiple of G
    value: torch.Tensor,  # [B, G, S, D]
    attn_mask: torch.Tensor,  # [B, 1 or H, T, S] bool, or added to the scores
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Attention [B, H, T, D] by our kernel; the mask includes all that is causal."""
    scale = scale or query.shape[-1] ** -0.5
    return torch.ops.drafthead.attend(query, key, value, added(attn_mask, query.dtype), scale)


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
    made = torch.ops.drafthead.with_children(*nodes[:3], opened, log_probs, tokens)
    return Candidates(*made, opened)


def chosen(nodes: Candidates, slots: torch.Tensor, levels: int) -> TreeTables:
    """`dynamic.best_tree`, for `slots` [N], by our kernel."""
    return TreeTables(*torch.ops.drafthead.best_tree(*nodes[:3], len(slots)))


def seen_columns(
    visible: torch.Tensor,  # [B or 1, N, M]
    lengths: torch.Tensor,  # [B]
    seen: torch.Tensor,  # [S], the numbers from 0
    first: int | torch.Tensor,
) -> torch.Tensor:
    """`visible_columns` [B, 1, N, S] by our kernel."""
    made: torch.Tensor = torch.ops.drafthead.visible_columns(
        visible, lengths, len(seen), int(first)
    )
    return made


def always(*_: Any, **__: Any) -> bool:
    """For all arguments."""
    return True


IN_BYTES = Substitution(functional.linear, partial(packed_linear, in_bytes=True), can_be_bytes)
SUBSTITUTIONS = (
    Substitution(functional.linear, packed_linear, can_be_packed),
    Substitution(torch.Tensor.topk, top_few, are_few),
    Substitution(functional.scaled_dot_product_attention, attend, has_mask),
    Substitution(functional.scaled_dot_product_attention, attention, always, is_kernel=False),
    Substitution(sampling.draw, kernel("draw"), always),
    Substitution(sampling.largest, kernel("largest"), always),
    Substitution(dynamic.open_level, opened, always),
    Substitution(dynamic.with_children, extended, always),
    Substitution(dynamic.best_tree, chosen, always),
    Substitution(visible_columns, seen_columns, always),
    Substitution(move_columns, kernel("move_columns"), always),
)
