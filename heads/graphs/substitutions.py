"""What compiled passes run on a CPU instead of torch's own products, attention and the like.

torch's attention works through blocks of queries: with few of them its time is spent on
preparations, and with one query it grows five times as fast with the number of keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class CpuKernels(TorchFunctionMode):
    """Replaces torch's products, attention and sorting: by ours, or by simple ones where those
    are faster.
    """

    def __init__(self, has_kernels: bool):
        """`has_kernels` says whether our kernels are there to be compiled."""
        super().__init__()
        self.has_kernels = has_kernels

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace `linear`, `scaled_dot_product_attention` and `topk`, and nothing else."""
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if func is functional.linear and self.has_kernels:
            return product(*args, **(kwargs or {}))
        if func is torch.Tensor.topk and self.has_kernels:
            return largest(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attention(
        self,
        query: torch.Tensor,  # [B, H, T, D]
        key: torch.Tensor,  # [B, H, S, D]
        value: torch.Tensor,  # [B, H, S, D]
        attn_mask: torch.Tensor | None = None,  # [B, 1 or H, T, S] bool, or added to the scores
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As torch's, with its arguments; the masks of our passes say all that is causal."""
        scale = scale or query.shape[-1] ** -0.5
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            blocked = torch.finfo(query.dtype).min
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, blocked)
        if self.has_kernels and attn_mask is not None and query.shape[-1] % 32 == 0:
            return torch.ops.drafthead.attend(query, key, value, attn_mask, scale)
        if query.shape[2] == 1:
            return attention_of_one(query, key, value, attn_mask, scale, enable_gqa)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def product(
    input: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:
    """input weight^T + bias [..., N], from packed weights where they stay as they are."""
    even = weight.shape[1] % 2 == 0  # values are multiplied in pairs
    if not (
        isinstance(weight, nn.Parameter) and input.dtype == weight.dtype == torch.bfloat16 and even
    ):
        return functional.linear(input, weight, bias)
    packed = torch.ops.drafthead.pack([weight])
    return torch.ops.drafthead.linear(input, packed, weight.shape[0], bias)


def largest(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of x [..., V] and their places, both [..., k], as `x.topk(k)` gives them."""
    # Where there are kernels, it has been imported already.
    from drafthead.heads.graphs.kernels.top_k import MOST

    if x.dtype != torch.float32 or dim != -1 or k > MOST:
        return x.topk(k, dim)
    places = torch.ops.drafthead.top(x, k)
    return x.gather(-1, places), places


def move_columns(
    keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
    values: Sequence[torch.Tensor],
    source: torch.Tensor,  # [B, P]
    destination: torch.Tensor,  # [B, P], none of them behind its source
) -> None:
    """Copy each row's columns `source` to `destination` in every layer, where there are kernels."""
    torch.ops.drafthead.move_columns([*keys, *values], source, destination)


def draw(
    logits: torch.Tensor,  # [..., V] bfloat16, or float32 where a model caps its logits in it
    temperature: torch.Tensor,  # scalar
    uniform: torch.Tensor,  # [...]
) -> torch.Tensor:
    """`sampling.draw`, where there are kernels."""
    return torch.ops.drafthead.draw(logits, temperature, uniform)


def attention_of_one(
    query: torch.Tensor,  # [B, H, 1, D]
    key: torch.Tensor,  # [B, H, S, D]
    value: torch.Tensor,  # [B, H, S, D]
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
