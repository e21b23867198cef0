"""Building blocks of small draft transformers: Llama's decoder layer in parts, and a cache for it.

Parameters carry the names that Llama checkpoints use (`self_attn.q_proj`, `mlp.gate_proj`, ...), so
that heads built from these parts read and write published formats without renaming.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafthead.heads.target.target import Target

# Columns by which a cache grows at least; it grows by half, so that long answers copy it few times.
BLOCK = 128
GROWTH = 1.5

# Ways of stretching rotary positions that do not depend on how a target divides its head dimension.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [B, 1, T, head_dim] each
Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
LayerStore = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a draft transformer's layers; what is 0 or None is filled in from the target."""

    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_bias: bool = False  # in the projections to queries, keys and values
    rms_norm_eps: float = 0.0
    max_position_embeddings: int = 0  # read by some ways of stretching rotary positions
    rope_parameters: dict[str, Any] | None = None  # transformers 5: rope_type, rope_theta

    def like(self, target: Target) -> Self:
        """The same shape with everything that it leaves open taken from the target's layers."""
        config, hidden = target.config, self.hidden_size or target.hidden_size
        num_heads = int(config.num_attention_heads)
        inner = getattr(config, "intermediate_size", None)
        found: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": inner if isinstance(inner, int) else 4 * hidden,
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // num_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": target.max_length or 2**20,
            "rope_parameters": rope_parameters_of(target),
        }
        return replace(self, **{name: v for name, v in found.items() if not getattr(self, name)})


def rope_parameters_of(target: Target) -> dict[str, Any]:
    """The target's rotary base and stretching; the usual base 10000 for a target without rotation.

    Of a target that rotates its kinds of layers differently, those with full attention count.
    """
    given = getattr(target.config, "rope_parameters", None) or {}
    given = dict(given.get("full_attention", given))
    theta = float(given.get("rope_theta") or 10000.0)
    if given.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    given.pop("partial_rotary_factor", None)  # a draft rotates its whole head dimension
    return {"rope_type": "default", **given, "rope_theta": theta}


class Rotary:
    """Rotary position embedding (Su et al., 2021, arXiv 2104.09864) on explicit positions.

    No module: casting a head to 16 bits must leave the frequencies in float32.
    """

    def __init__(self, config: LayerConfig):
        shape = LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters or {}),
        )
        with torch.device("cpu"):  # even where a head is laid out on `meta` before it is filled
            rotary = LlamaRotaryEmbedding(shape)
        self.frequencies = rotary.inv_freq.float()  # [head_dim / 2]
        self.scaling = float(rotary.attention_scaling)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Rotation of positions [B, T]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotated(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """States [B, H, T, head_dim] turned to their positions."""
    cos, sin = (table.to(states.dtype) for table in rotation)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm that computes in the type of its weight.

    In mixed precision the weight is wider than what comes in, for which torch has no fast kernel.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [..., D] to [..., D]."""
        return super().forward(hidden.to(self.weight.dtype))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the mask is always explicit.

    `input_size` is the width of what queries, keys and values are made of, the hidden size unless
    given. `qk_norm` normalises queries and keys of each head before they are rotated (Qwen3).
    """

    def __init__(self, config: LayerConfig, input_size: int | None = None, qk_norm: bool = False):
        super().__init__()
        self.head_dim = config.head_dim
        width = input_size or config.hidden_size
        size, kv_size = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(width, size, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(config.head_dim, eps=eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=eps) if qk_norm else None

    def forward(
        self,
        hidden: torch.Tensor,  # [B, T, width]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool, true where a query may look
        store: Store | None = None,
    ) -> torch.Tensor:
        """Attention output [B, T, D].

        `store` takes the new keys and values and gives all S that the mask speaks of, such as
        those of a cache with the new ones behind them; without it the new ones are all there is.
        """
        keys, values = self.keys_values(hidden, rotation)
        if store is not None:
            keys, values = store(keys, values)
        return self.attend(self.queries(hidden, rotation), keys, values, mask)

    def queries(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotated queries [B, H, T, head_dim] of hidden [B, T, width]."""
        queries = self._heads(self.q_proj(hidden))
        return rotated(queries if self.q_norm is None else self.q_norm(queries), rotation)

    def keys_values(
        self, hidden: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values [B, Hkv, T, head_dim] of hidden [B, T, width]."""
        keys = self._heads(self.k_proj(hidden))
        keys = rotated(keys if self.k_norm is None else self.k_norm(keys), rotation)
        return keys, self._heads(self.v_proj(hidden))

    def attend(
        self,
        queries: torch.Tensor,  # [B, H, T, head_dim]
        keys: torch.Tensor,  # [B, Hkv, S, head_dim]
        values: torch.Tensor,  # [B, Hkv, S, head_dim]
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
    ) -> torch.Tensor:
        """What the queries find, projected: [B, T, D]."""
        grouped = queries.shape[1] != keys.shape[1]
        found = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=grouped)
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, heads x head_dim] as [B, heads, T, head_dim]."""
        return states.view(*states.shape[:2], -1, self.head_dim).transpose(1, 2)


class GatedMlp(nn.Module):
    """Llama's feed-forward part, down(silu(gate(x)) up(x)) (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [..., D] to [..., D]."""
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer; `input_norm` false leaves out the norm before the attention."""

    def __init__(self, config: LayerConfig, input_norm: bool = True, qk_norm: bool = False):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = GatedMlp(config)

    def forward(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
        store: Store | None = None,
    ) -> torch.Tensor:
        """Maps [B, T, D] to [B, T, D]; see `Attention.forward`."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, rotation, mask, store)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class CacheColumns:
    """What one pass sees of a cache: where its keys and values go, and how far it looks.

    Made of tensors, so that a compiled pass can be given them.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, Hkv, capacity, head_dim]
        values: Sequence[torch.Tensor],
        columns: torch.Tensor,  # [N] that the pass writes
        end: int,  # columns that it sees
    ):
        self.keys, self.values, self.columns, self.end = keys, values, columns, end

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values [B, Hkv, N, head_dim].

        Returns all columns [B, Hkv, S, head_dim] of both, which the mask speaks of.
        """
        stores = self.keys[layer], self.values[layer]
        for store, states in zip(stores, (keys, values), strict=True):
            store.index_copy_(2, self.columns, states)
        return stores[0][:, :, : self.end], stores[1][:, :, : self.end]


class DraftCache:
    """Keys and values of a draft transformer: what each row has committed, then what is pending.

    Column layout for rows that have committed 5, 3 and 4 positions (`#`), with two pending nodes
    (`t`) behind them::

        # # # # # t t
        # # # . . t t
        # # # # . t t

    A pass over N nodes asks for its positions, its mask and its columns, writes the nodes into
    these columns of every layer and calls `stay`; more passes may follow. `commit` keeps the first
    pending nodes of each row, `discard` none.
    """

    def __init__(self, layers: Iterable[nn.Module]):
        """A cache for layers that have their attention under the name `self_attn`."""
        attentions = [cast(Attention, layer.self_attn) for layer in layers]
        self.weights = [attention.k_proj.weight for attention in attentions]
        self.head_dims = [attention.head_dim for attention in attentions]
        # Of each layer [B, Hkv, capacity, head_dim]; there is nothing before the first pass.
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.lengths: torch.Tensor | None = None  # [B] committed positions
        self.longest = 0  # no row has committed more; known without asking the device
        self.pending = 0

    def positions(self, nodes: torch.Tensor) -> torch.Tensor:
        """Positions [B or 1, N] of new nodes [B, N] that stand behind each other."""
        steps = torch.arange(nodes.shape[1], device=nodes.device)[None]
        return steps if self.lengths is None else self.lengths[:, None] + steps

    def mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The bool mask [B or 1, 1, N, S] of a pass over N new nodes.

        `visible` [B or 1, N, pending + N] says which pending and new nodes each new node sees;
        every node sees all that its row has committed.
        """
        if self.lengths is None:
            return visible[:, None]
        columns = torch.arange(self.longest, device=visible.device)
        committed = (columns < self.lengths[:, None])[:, None, None]  # [B, 1, 1, longest]
        batch, num_nodes = self.lengths.shape[0], visible.shape[1]
        return torch.cat(
            [
                committed.expand(batch, 1, num_nodes, -1),
                visible[:, None].expand(batch, 1, num_nodes, -1),
            ],
            dim=-1,
        )

    def columns(self, nodes: torch.Tensor) -> torch.Tensor:
        """The columns [N] for a pass over new nodes [B, N], behind what is pending; makes room."""
        start = self.longest + self.pending
        end = start + nodes.shape[1]
        capacity = self.keys[0].shape[2] if self.keys else 0
        if capacity <= end:  # never full: compiled passes would take that for another layout
            capacity = -(-int(end * GROWTH) // BLOCK) * BLOCK
            self.keys, self.values = (
                self._enlarged(old, nodes.shape[0], capacity) for old in (self.keys, self.values)
            )
        return torch.arange(start, end, device=nodes.device)

    def _enlarged(self, old: list[torch.Tensor], rows: int, capacity: int) -> list[torch.Tensor]:
        """Tensors of each layer that begin with the old ones, if there are any."""
        stores = []
        for layer, (weight, size) in enumerate(zip(self.weights, self.head_dims, strict=True)):
            # Zeros: a masked column still takes part in sums, and 0 x NaN is NaN.
            store = weight.new_zeros(rows, weight.shape[0] // size, capacity, size)
            if old:
                store[:, :, : old[layer].shape[2]] = old[layer]
            stores.append(store)
        return stores

    def stay(self, num_nodes: int) -> None:
        """The nodes of the last pass stay pending."""
        self.pending += num_nodes

    def discard(self) -> None:
        """Forget all pending nodes."""
        self.pending = 0

    def commit(self, counts: torch.Tensor) -> None:
        """Keep the first `counts` [B] pending nodes of each row and forget the others.

        With 5 and 3 positions committed and nodes at columns 5 6, counts (1, 2) keep column 5 of
        the first row and move columns 5 6 of the second to 3 4: 6 and 5 are committed.
        """
        added, on_cpu = self.pending, counts.device.type == "cpu"
        self.pending = 0
        if self.lengths is None:  # all rows begin at the first column
            self.lengths = counts
        else:
            if counts.shape[0] > 1 or not on_cpu:
                self._move(self.lengths, added)
            self.lengths = self.lengths + counts
        self.longest += added
        self._measure()

    def _move(self, lengths: torch.Tensor, added: int) -> None:
        """Copy the pending columns behind each row's committed ones [B]."""
        rows = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
        places = lengths[:, None] + torch.arange(added, device=lengths.device)
        for store in (*self.keys, *self.values):
            by_column = store.transpose(1, 2)  # [B, columns, Hkv, head_dim], a view
            moved = by_column[:, self.longest : self.longest + added].clone()
            by_column[rows, places] = moved

    def _measure(self) -> None:
        """Lower `longest` to what the longest row has committed.

        Reading that off a GPU is a synchronisation, so there it waits until the cache is full.
        """
        assert self.lengths is not None
        if self.lengths.device.type == "cpu" or self.longest + BLOCK > self.keys[0].shape[2]:
            self.longest = int(self.lengths.max())

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with the rows [R] of the batch only, in that order."""
        self.keys = [store[rows] for store in self.keys]
        self.values = [store[rows] for store in self.values]
        if self.lengths is not None:
            self.lengths = self.lengths[rows]
            self._measure()
