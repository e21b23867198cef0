"""Our kernels as operations of torch: `torch.ops.drafthead.linear(x, packed, size, bias)`.

Each has a schema and an implementation in torch's own operations, which says what it computes and
runs where there are no kernels. The C++ of `library` takes the place of the implementations on
processors that it is written for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from drafthead.backends.cpu.kernels import packing
from drafthead.core import sampling
from drafthead.core.drafting.drafter import at_last
from drafthead.core.kv_cache.column_cache import move_columns, visible_columns
from drafthead.core.target import int8
from drafthead.core.target.blocks import Blocks
from drafthead.core.trees.tree import TreeTables
from drafthead.heads.growing import dynamic

MOST = 64  # of the largest: for more, sorting is faster
NORM_MULTIPLE = 32  # norms and heads are of a multiple of so many values
LARGEST_HEAD = 256
LAYER_WEIGHTS = 10  # tensors of a decoder layer

Function = Callable[..., Any]


def operation(signature: str) -> Callable[[Function], Function]:
    """Make a function known to torch as `drafthead::` and the signature."""
    name = f"drafthead::{signature.partition('(')[0]}"

    def register(function: Function) -> Function:
        """Make a function what the operation runs; returns it."""
        torch.library.define(name, signature[signature.index("(") :])
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        return function

    return register


operation("pack(Tensor[] weights, bool paired=False, bool in_int8=False) -> Tensor")(packing.pack)


@operation("write_blocks(Tensor(a!) packed, Tensor raw, int kind) -> ()")
def write_blocks(
    packed: torch.Tensor,  # [N / 32, bytes] uint8
    raw: torch.Tensor,  # [N, bytes of a row] uint8
    kind: int,  # its place in KINDS
) -> None:
    """Write a matrix as the kernels read it, see `blocks.h`."""
    raise NotImplementedError("blocks are packed for kernels, and there are none here")


operation("int8_rows(Tensor x) -> (Tensor, Tensor)")(int8.rounded)


@operation("linear(Tensor x, Tensor packed, SymInt size, Tensor? bias) -> Tensor")
def linear(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # from `pack`
    size: int,  # N
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """x weight^T + bias [..., N]; of packed blocks it is `blocks.product`, by kernels alone."""
    if packed.dtype == torch.int32:
        numbers, scales = (part.flatten(0, 1)[:size] for part in packing.unpacked_int8(packed))
        return int8.product(x, numbers, scales, bias)
    return functional.linear(x, packing.unpacked(packed).flatten(0, 1)[:size], bias)


@operation("in_blocks(Tensor x, Tensor raw, str kind, Tensor? bias) -> Tensor")
def in_blocks(
    x: torch.Tensor,  # [..., K]
    raw: torch.Tensor,  # [N, bytes of a row] uint8
    kind: str,  # of KINDS
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """`blocks.product`, by kernels alone; the matrix is packed where it is not yet."""
    packed = packing.pack_blocks([Blocks(kind, raw)])
    made: torch.Tensor = torch.ops.drafthead.linear(x, packed, raw.shape[0], bias)
    return made


@operation("gated(Tensor x, Tensor packed, SymInt size) -> Tensor")
def gated(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # of [2N, K], paired, from `pack`
    size: int,  # N, a multiple of 32
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T) [..., N]."""
    gate, up = (linear(x, packed[half::2], size, None) for half in range(2))
    return functional.silu(gate) * up


@operation("attend(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor")
def attend(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D], H a multiple of G
    value: torch.Tensor,  # [B, G, S, D]
    mask: torch.Tensor,  # [B or 1, H or 1, T, S] bool, or added to the scores
    scale: float,
) -> torch.Tensor:
    """softmax(scale query key^T + mask) value [B, H, T, D], laid out as [B, T, H, D]."""
    output = functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@operation("rms_norm(Tensor x, Tensor weight, float eps, bool plus_one) -> Tensor")
def rms_norm(
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D]
    eps: float,
    plus_one: bool,
) -> torch.Tensor:
    """weight x / sqrt(mean(x^2) + eps) [..., D]; weights less one are stored if `plus_one`."""
    numbers = x.float()
    normed = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normed * (1 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


@operation("rotations(Tensor positions, Tensor frequencies, float scale) -> (Tensor, Tensor)")
def rotations(
    positions: torch.Tensor,  # [B, T]
    frequencies: torch.Tensor,  # [D / 2] float32
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, T, D] of rotary positions, bfloat16."""
    angles = positions[..., None].float() * frequencies
    both = torch.cat([angles, angles], dim=-1)
    return (both.cos() * scale).bfloat16(), (both.sin() * scale).bfloat16()


@operation(
    "decoder_layers(Tensor hidden, Tensor cos, Tensor sin, Tensor mask, Tensor[] keys, "
    "Tensor[] values, Tensor columns, Tensor[] weights, float eps, float scale, int[] kept, "
    "Tensor? given=None) -> Tensor[]"
)
def decoder_layers(
    hidden: torch.Tensor,  # [B, T, D]
    cos: torch.Tensor,  # [B or 1, T, head]
    sin: torch.Tensor,  # as cos
    mask: torch.Tensor,  # [B or 1, 1, T, S] bool, or added to the scores
    keys: Sequence[torch.Tensor],  # of each layer [B, G, capacity, head]
    values: Sequence[torch.Tensor],  # as keys
    columns: torch.Tensor,  # [T] that the tokens' keys and values are written to
    weights: Sequence[torch.Tensor],  # `LAYER_WEIGHTS` of each layer
    eps: float,
    scale: float,
    kept: Sequence[int],  # which layers' outputs are returned, in ascending order
    given: torch.Tensor | None = None,  # [B, T, K]
) -> list[torch.Tensor]:
    """Outputs [B, T, D] of layers as Llama's that follow each other, with keys and values written.

    The attention of the first reads what is `given`, by default the norm of its input.
    """
    states = []
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        own = weights[number * LAYER_WEIGHTS : (number + 1) * LAYER_WEIGHTS]
        read = None if number else given
        hidden = decoder_layer(hidden, cos, sin, mask, key, value, columns, own, eps, scale, read)
        states += [hidden] if number in kept else []
    return states


def decoder_layer(
    hidden: torch.Tensor,  # [B, T, D]
    cos: torch.Tensor,  # [B or 1, T, head]
    sin: torch.Tensor,  # as cos
    mask: torch.Tensor,  # [B or 1, 1, T, S] bool, or added to the scores
    keys: torch.Tensor,  # [B, G, capacity, head]
    values: torch.Tensor,  # as keys
    columns: torch.Tensor,  # [T] that the tokens' keys and values are written to
    weights: Sequence[torch.Tensor],
    eps: float,
    scale: float,
    given: torch.Tensor | None,  # [B, T, K]
) -> torch.Tensor:
    """The output [B, T, D] of one of `decoder_layers`.

    `weights` are: input norm, packed q|k|v and its bias, norms of queries and keys, packed output
    product and its bias, norm before the MLP, packed gate and up (paired), packed down. What a
    layer does not have is a tensor without numbers.
    """
    norm, qkv, qkv_bias, q_norm, k_norm, out, out_bias, mlp_norm, gate_up, down = weights
    batch, tokens, width = hidden.shape
    groups, size = keys.shape[1], keys.shape[3]
    across = qkv.shape[0] * packing.COLUMNS
    attended = rms_norm(hidden, norm, eps, False) if given is None else given
    states = linear(attended, qkv, across, or_none(qkv_bias))
    heads = states.view(batch, tokens, -1, size).transpose(1, 2)
    query, key, value = heads.split([heads.shape[1] - 2 * groups, groups, groups], dim=1)
    if q_norm.numel():
        query, key = rms_norm(query, q_norm, eps, False), rms_norm(key, k_norm, eps, False)
    keys.index_copy_(2, columns, rotated(key, cos, sin))
    values.index_copy_(2, columns, value)
    seen = mask.shape[-1]
    states_seen = keys[:, :, :seen], values[:, :, :seen]
    mixed = attend(rotated(query, cos, sin), *states_seen, mask, scale).transpose(1, 2).flatten(2)
    hidden = hidden + linear(mixed, out, width, or_none(out_bias))
    between = gated(rms_norm(hidden, mlp_norm, eps, False), gate_up, gate_up.shape[0] * 16)
    return hidden + linear(between, down, width, None)


@operation(
    "eagle3_pass(Tensor[] layers, Tensor[] own, SymInt size, float eps, float scale, float turn, "
    "bool adds_normed, bool feeds_norm, Tensor table, Tensor tokens, Tensor states, "
    "bool is_drafted, Tensor positions, Tensor mask, Tensor[] keys, Tensor[] values, "
    "Tensor columns, Tensor? ends) -> (Tensor, Tensor)"
)
def eagle3_pass(
    layers: Sequence[torch.Tensor],  # weights of all
    own: Sequence[torch.Tensor],  # see below
    size: int,
    eps: float,
    scale: float,
    turn: float,
    adds_normed: bool,  # `Eagle3Config.norm_before_residual`
    feeds_norm: bool,  # `Eagle3Config.norm_feedback`
    table: torch.Tensor,  # [V, D] embeddings
    tokens: torch.Tensor,  # [B, T]
    states: torch.Tensor,  # [B, T, D], or outputs
    is_drafted: bool,  # whether these are outputs
    positions: torch.Tensor,  # [B, T]
    mask: torch.Tensor,  # from here on as `decoder_layers`
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    columns: torch.Tensor,
    ends: torch.Tensor | None,  # [B]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, T, D] and logits [B, T, size] of an EAGLE-3 head; with `ends` those of the last
    of so many positions of each row alone.

    Its own weights are: norms of embeddings, states and outputs, rotary frequencies, packed output
    head.
    """
    embed_norm, state_norm, norm, frequencies, head = own
    before = rms_norm(states, norm, eps, False) if is_drafted and feeds_norm else states
    normed = rms_norm(before, state_norm, eps, False)
    given = torch.cat([rms_norm(table[tokens], embed_norm, eps, False), normed], dim=-1)
    cos, sin = rotations(positions, frequencies, turn)
    cached = mask, keys, values, columns, layers, eps, scale, [len(keys) - 1]
    [outputs] = decoder_layers(normed if adds_normed else before, cos, sin, *cached, given)
    if ends is not None:
        outputs = at_last(outputs, ends)[:, None]
    return outputs, linear(rms_norm(outputs, norm, eps, False), head, size, None)


def or_none(x: torch.Tensor) -> torch.Tensor | None:
    """None for a tensor [...] without numbers."""
    return x if x.numel() else None


def rotated(
    x: torch.Tensor,  # [B, H, T, D]
    cos: torch.Tensor,  # [B or 1, T, D]
    sin: torch.Tensor,  # as cos
) -> torch.Tensor:
    """x [B, H, T, D] turned to its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


operation("largest_logits(Tensor x, SymInt count) -> (Tensor, Tensor, Tensor)")(sampling.largest)
operation("most_probable(Tensor logits) -> Tensor")(sampling.most_probable)


@operation(
    "open_level(Tensor scores, Tensor tokens, Tensor opened, Tensor outputs, Tensor? visible, "
    "SymInt count, SymInt width) -> (Tensor, Tensor, Tensor, Tensor)"
)
def open_level(
    scores: torch.Tensor,  # [B, C]
    tokens: torch.Tensor,  # [B, C]
    opened: torch.Tensor,  # [B, F]
    outputs: torch.Tensor,  # [B, F, D]
    visible: torch.Tensor | None,  # [B, F, P]
    count: int,
    width: int,
) -> dynamic.Opened:
    """`dynamic.open_level` of `count` nodes."""
    growth = dynamic.Growth(scores, tokens, tokens, opened, outputs, visible)
    return dynamic.open_level(growth, torch.arange(count), width)


@operation(
    "with_children(Tensor scores, Tensor tokens, Tensor parents, Tensor opened, Tensor log_probs, "
    "Tensor ids) -> (Tensor, Tensor, Tensor)"
)
def with_children(
    scores: torch.Tensor,  # [B, C]
    tokens: torch.Tensor,  # [B, C]
    parents: torch.Tensor,  # [B, C]
    opened: torch.Tensor,  # [B, n]
    log_probs: torch.Tensor,  # [B, n, k]
    ids: torch.Tensor,  # [B, n, k]
) -> tuple[torch.Tensor, ...]:
    """`dynamic.with_children`: scores, tokens and parents."""
    growth = dynamic.Growth(scores, tokens, parents, opened, opened, None)
    return dynamic.with_children(growth, opened, log_probs, ids)[:3]


@operation(
    "best_tree(Tensor scores, Tensor tokens, Tensor parents, SymInt nodes) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def best_tree(
    scores: torch.Tensor,  # [B, C]
    tokens: torch.Tensor,  # [B, C]
    parents: torch.Tensor,  # [B, C]
    nodes: int,
) -> TreeTables:
    """`dynamic.best_tree` of so many nodes."""
    growth = dynamic.Growth(scores, tokens, parents, parents, parents, None)
    return dynamic.best_tree(growth, torch.arange(nodes), nodes - 1)


operation("visible_columns(Tensor visible, Tensor lengths, Tensor seen, Tensor columns) -> Tensor")(
    visible_columns
)
operation(
    "move_columns(Tensor(a!)[] keys, Tensor(b!)[] values, Tensor source, Tensor destination) -> ()"
)(move_columns)
