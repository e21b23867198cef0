"""A Llama layer in plain functions of stored tensors, for replaying what readers compute.

Written apart from heads.draft_layers, so that a replay does not repeat mistakes made there.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LayerShape:
    """What a reader takes from a configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


def rms_normed(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Hidden [..., D] over its root mean square, times weight [D]."""
    return hidden * (hidden.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def projected(hidden: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    """The linear layer called `name`, with a bias if there is one."""
    bias = tensors.get(f"{name}.bias")
    return linear(hidden, tensors[f"{name}.weight"].float(), None if bias is None else bias.float())


def turned(states: torch.Tensor, theta: float) -> torch.Tensor:
    """States [H, T, d] rotated to positions 0 to T - 1, first half of d against second half."""
    half = states.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(states.shape[1], dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(hidden: torch.Tensor, tensors: Tensors, name: str, shape: LayerShape) -> torch.Tensor:
    """Causal self-attention over all positions [T, D']: [T, D]."""
    count = hidden.shape[0]
    queries, keys, values = (
        projected(hidden, tensors, f"{name}.{part}_proj").view(count, -1, shape.head_dim)
        for part in "qkv"
    )
    queries = turned(queries.transpose(0, 1), shape.rope_theta)
    keys = turned(keys.transpose(0, 1), shape.rope_theta)
    repeats = shape.num_heads // shape.num_kv_heads
    keys, values = (
        states.repeat_interleave(repeats, dim=0) for states in (keys, values.transpose(0, 1))
    )
    scores = queries @ keys.transpose(1, 2) / shape.head_dim**0.5
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return projected((weights @ values).transpose(0, 1).flatten(1), tensors, f"{name}.o_proj")


def decoder_layer(
    hidden: torch.Tensor, tensors: Tensors, name: str, shape: LayerShape
) -> torch.Tensor:
    """A Llama layer over [T, D]; without the tensor of its first norm it has none (EAGLE)."""
    norm = tensors.get(f"{name}.input_layernorm.weight")
    normed = hidden if norm is None else rms_normed(hidden, norm, shape.rms_norm_eps)
    hidden = hidden + attention(normed, tensors, f"{name}.self_attn", shape)
    weight = tensors[f"{name}.post_attention_layernorm.weight"]
    return hidden + gated_mlp(
        rms_normed(hidden, weight, shape.rms_norm_eps), tensors, f"{name}.mlp"
    )


def gated_mlp(hidden: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    """Llama's feed-forward part over [..., D]."""
    gate = silu(projected(hidden, tensors, f"{name}.gate_proj"))
    return projected(
        gate * projected(hidden, tensors, f"{name}.up_proj"), tensors, f"{name}.down_proj"
    )
