"""Building blocks of small draft transformers: Llama's decoder layer and its parts.

Parameters carry the names that Llama checkpoints use (`self_attn.q_proj`, `mlp.gate_proj`, ...), so
that heads built from these parts read and write published formats without renaming.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.configuration_utils import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafthead.core.kv_cache.column_cache import GrowingKeys
from drafthead.core.target.target import Target

# Ways to scale rotary positions that do not depend on how a target divides its head dimension.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [B, 1, T, head_dim] each
# Takes new keys and values [B, Hkv, T, head_dim], returns all S that a pass attends to.
Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
StoreOf = Callable[[int], Store]  # of each layer


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
    max_position_embeddings: int = 0  # read by some ways to scale rotary positions
    rope_parameters: dict[str, Any] | None = None  # transformers 5: rope_type, rope_theta

    def like(self, target: Target) -> Self:
        """This shape with the sizes that it leaves open taken from the target's layers."""
        config, hidden = config_of_layer(target.config), self.hidden_size or target.hidden_size
        num_heads = int(config.num_attention_heads)
        inner = getattr(config, "intermediate_size", None)
        defaults: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": inner if isinstance(inner, int) else 4 * hidden,
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // num_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": target.max_length or 2**20,
            "rope_parameters": rope_parameters_of(target),
        }
        return replace(self, **{name: v for name, v in defaults.items() if not getattr(self, name)})


def config_of_layer(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration as it is for the last layer with full attention, where layers differ."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    kinds = list(getattr(config, "layer_types", None) or ())
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    return config.per_layer_config[full[-1] if full else -1]


def rope_parameters_of(target: Target) -> dict[str, Any]:
    """The target's rotary base and scaling; the usual base 10000 for a target without rotation.

    Where kinds of layers rotate differently, those with full attention count, if they rotate.
    """
    given = getattr(target.config, "rope_parameters", None) or {}
    kinds = [given.get("full_attention"), *given.values()]
    given = dict(next((kind for kind in kinds if isinstance(kind, Mapping)), given))
    theta = float(given.get("rope_theta") or 10000.0)
    if given.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    given.pop("partial_rotary_factor", None)  # a draft rotates its whole head dimension
    return {"rope_type": "default", **given, "rope_theta": theta}


@dataclass(eq=False)
class Rotary:
    """Rotary position embedding (Su et al., 2021, arXiv 2104.09864) on explicit positions.

    Not a module: casting a head to 16 bits must leave the frequencies in float32.
    """

    frequencies: torch.Tensor  # [head_dim / 2]
    scaling: float

    @classmethod
    def of(cls, config: LayerConfig) -> "Rotary":
        """The embedding of a layer's positions."""
        shape = LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters or {}),
        )
        with torch.device("cpu"):  # even where a head is laid out on `meta` before it is filled
            rotary = LlamaRotaryEmbedding(shape)
        return cls(rotary.inv_freq.float(), float(rotary.attention_scaling))

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """The rotation of positions [B, T]."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotated(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """States [B, H, T, head_dim] rotated by their positions."""
    cos, sin = (table.to(states.dtype) for table in rotation)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm that computes in the type of its weight.

    In mixed precision the weight is wider than the input, for which torch has no fast kernel.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [..., D] to [..., D]."""
        return super().forward(hidden.to(self.weight.dtype))


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; the mask is always explicit.

    `input_size` is the width of the input, the hidden size unless given. `qk_norm` normalises the
    queries and keys of each head before they are rotated (Qwen3).
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

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Heads of the keys and values of a position, and the widths of a key and a value."""
        return self.k_proj.weight.shape[0] // self.head_dim, self.head_dim, self.head_dim

    def forward(
        self,
        hidden: torch.Tensor,  # [B, T, width]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool, true where a query may look
        store: Store | None = None,
    ) -> torch.Tensor:
        """Attention output [B, T, D].

        `store` takes the new keys and values and returns those of all S columns of the mask, such
        as a cache's and then the new ones; without it there are only the new ones.
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
        keys: torch.Tensor | GrowingKeys,  # [B, Hkv, S, head_dim]
        values: torch.Tensor | GrowingKeys,  # as keys
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
    ) -> torch.Tensor:
        """Attention of the queries to the keys and values, projected: [B, T, D].

        In recorded passes the mask is what the kernel takes in its place, and the keys are growing.
        """
        if isinstance(keys, GrowingKeys) and isinstance(values, GrowingKeys):
            states = queries, keys.cache, values.cache, keys.new, values.new, mask
            how = self.head_dim**-0.5, keys.pending, None, None
            return self.o_proj(torch.ops.drafthead.tree_attention(*states, *how))
        assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
        grouped = queries.shape[1] != keys.shape[1]
        mixed = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

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
    """A pre-norm decoder layer.

    `input_norm` false leaves out the norm before the attention, and `input_size` is the width of
    what the attention reads, the hidden size unless given.
    """

    def __init__(
        self,
        config: LayerConfig,
        input_norm: bool = True,
        qk_norm: bool = False,
        input_size: int | None = None,
    ):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps) if input_norm else nn.Identity()
        self.self_attn = SelfAttention(config, input_size, qk_norm)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = GatedMlp(config)

    def forward(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
        store: Store | None = None,
    ) -> torch.Tensor:
        """Maps [B, T, D] to [B, T, D]; see `SelfAttention.forward`."""
        return self.added(*self.inputs(hidden), rotation, mask, store)

    def inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that the layer adds to, [B, T, D], and its attention's input, [B, T, K]."""
        return hidden, self.input_layernorm(hidden)

    def added(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        read: torch.Tensor,  # [B, T, K]
        rotation: Rotation,
        mask: torch.Tensor | None,  # [B or 1, 1, T, S] bool
        store: Store | None = None,
    ) -> torch.Tensor:
        """The hidden states with what attention makes of what is read, and then the MLP, added."""
        hidden = hidden + self.self_attn(read, rotation, mask, store)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def silence(self) -> None:
        """Make it give what it reads, until it is trained: its attention and MLP add zeros."""
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)
