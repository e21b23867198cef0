"""Draft transformers in other projects' checkpoints: configuration keys and arithmetic.

Configurations are those of transformers for Llama and Qwen3, of version 4 (`rope_theta` beside
`rope_scaling`) and of version 5 (`rope_parameters`); both are read and both are written. Tensors
need no renaming: see `heads.layers.decoder_layer`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafthead.core.errors import UserError
from drafthead.core.printing import shown
from drafthead.heads.formats.base import Tensors
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import (
    WRITTEN,
    Count,
    Epsilon,
    Keys,
    Parts,
    Place,
    Reasons,
    Size,
    Vocabulary,
    only,
)
from drafthead.heads.formats.rope import DEFAULT_THETA, rope_of
from drafthead.heads.layers.decoder_layer import LayerConfig

OUTPUT_BIAS = "self_attn.o_proj.bias"  # which our layers do not have


# Reading


FULL, SLIDING = "full_attention", "sliding_attention"
NOT_OURS = "our draft layers cannot compute that"
# Types of models whose layers are ours; what else sets them apart has keys or tensors of its own.
LIKE_LLAMA = (
    "",  # of transformers' base class
    *("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("dflash", "eagle", "eagle3", "muse_glimmer_assistant"),
)


class LayerKeys(Keys):
    """Keys of transformers' Llama and Qwen3 that describe layers."""

    neutral: ClassVar[Reasons] = {
        **WRITTEN,
        "shown by the tensors": "attention_bias qkv_bias",
        "computed in parts, it is the same": "pretraining_tp",
        "of layers with experts, whose tensors have other names": (
            "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
            "num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef "
            "router_jitter_noise"
        ),
    }
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None  # as many as attention heads
    head_dim: Size | None = None  # the hidden size divided by the attention heads
    num_hidden_layers: Parts | None = None
    vocab_size: Vocabulary | None = None
    rms_norm_eps: Epsilon = 1e-6
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    layer_types: Annotated[list[str], Field(fail_fast=True)] = Field(default=[])
    sliding_window: Count = 0
    use_sliding_window: bool | None = None
    max_window_layers: Count = 0  # of Qwen2 and 3: without `layer_types` those from here on slide
    # What our layers do not have.
    model_type: Annotated[
        str,
        only(
            *LIKE_LLAMA,
            why="how its layers differ from Llama's is not known here; if they do not, write llama",
        ),
    ] = "llama"
    hidden_act: Annotated[str, only("silu", "swish", why=NOT_OURS)] = "silu"
    mlp_bias: Annotated[bool, only(False, why=NOT_OURS)] = False
    partial_rotary_factor: Annotated[float, only(1, why=NOT_OURS)] = 1.0
    rope_is_neox_style: Annotated[bool, only(True, why=NOT_OURS)] = True
    use_gemma_norm: Annotated[bool, only(False, why=NOT_OURS)] = False
    logit_scale: Annotated[float, only(1, why="our heads do not scale logits, as vLLM would")] = 1.0


def layer_options(
    checkpoint: Checkpoint, place: Place, keys: LayerKeys, first_layer: str, kind: str = FULL
) -> dict[str, Any]:
    """The fields of `LayerConfig` from the object at `place`, in which `keys` were read.

    The first layer's tensors have names that begin with `first_layer`; `kind` is that of all
    layers. Raises UserError where configuration and tensors disagree.
    """
    attention = first_layer + "self_attn."
    hidden, heads = keys.hidden_size, keys.num_attention_heads
    shared, size = keys.num_key_value_heads or heads, keys.head_dim or hidden // heads
    for part, count in (("q_proj", heads), ("k_proj", shared)):
        rows = checkpoint.shape(f"{attention}{part}.weight", 2)[0]
        if not 0 < count * size == rows:
            raise UserError(
                f"{checkpoint.weights}: {attention}{part}.weight has {rows} rows, but its "
                f"configuration says {count} heads of {size}"
            )
    keys.check(hidden_size=checkpoint.shape(attention + "o_proj.weight", 2)[0])
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": size,
        "attention_bias": attention + "q_proj.bias" in checkpoint.tensors,
        "rms_norm_eps": keys.rms_norm_eps,
        "max_position_embeddings": keys.max_position_embeddings,
        "rope_parameters": rope_of(checkpoint, size, place, kind),
    }


def kinds_of_layers(keys: LayerKeys, num_layers: int) -> set[str]:
    """The kinds of layers, those that see all and those that slide, by transformers' keys."""
    if keys.layer_types:
        return set(keys.layer_types)
    from_here = num_layers
    if keys.use_sliding_window and keys.sliding_window:
        from_here = min(num_layers, keys.max_window_layers)
    return {FULL} if from_here == num_layers else {SLIDING} if from_here == 0 else {FULL, SLIDING}


def window_hides(keys: LayerKeys, window: int) -> bool:
    """Tell whether a window hides anything; one as long as the context does not."""
    return not 0 < keys.max_position_embeddings <= window


def common_window(file: Path, keys: LayerKeys, num_layers: int) -> int:
    """The window by which all layers of a recurrent head slide, 0 if they see everything.

    Raises UserError where only some layers slide, and for a window without a size.
    """
    kinds, window = kinds_of_layers(keys, num_layers), keys.sliding_window
    if kinds == {FULL} or not window_hides(keys, window):
        return 0
    if kinds != {SLIDING} or not window:
        raise UserError(
            f"{file}: layer_types is {shown(keys.layer_types)} with a sliding_window of {window}, "
            "but our layers slide all or none, by a window with a size; serve it with the software "
            "that trained it"
        )
    return window


def window_keys(num_layers: int, window: int) -> dict[str, Any]:
    """The keys of transformers by which all layers slide by a window, or see all if it is 0."""
    return {
        "layer_types": [SLIDING if window else FULL] * num_layers,
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
    }


class FullLayerKeys(LayerKeys):
    """Keys of layers where the vocabulary cannot be read from the tensors."""

    vocab_size: Vocabulary
    draft_vocab_size: Vocabulary | None = None


def without_output_bias(tensors: Tensors) -> Tensors:
    """The tensors [...] without attention output biases that are 0.

    Other such biases stay, and are refused as unknown when the head is built.
    """
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (name.endswith(OUTPUT_BIAS) and not tensor.any())
    }


def num_layers_of(names: Iterable[str], prefix: str = "layers.") -> int:
    """The number of layers in the names of tensors."""
    numbers = {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}
    return len({number for number in numbers if number.isdigit()})


def draft_vocabulary(checkpoint: Checkpoint, vocab_size: int, claimed: int | None) -> Tensors:
    """The tables `d2t` [Vd] and `t2d` [V] of a draft vocabulary, or nothing without one.

    `d2t` holds for each guess the distance to its token, `t2d` whether a token can be guessed: for
    4 tokens of which 1 and 3 can be guessed they are 1 2 and F T F T. A missing `t2d` is computed.
    Raises UserError when a guess has no token, two guesses have the same one, the tables disagree,
    or the configuration has `claimed` another size of the draft vocabulary.
    """
    size = checkpoint.shape("d2t", 1)[0] if "d2t" in checkpoint.tensors else vocab_size
    if claimed not in (None, size):
        raise UserError(
            f"{checkpoint.config_file} says draft_vocab_size {claimed}, but the tensors have {size}"
        )
    if "d2t" not in checkpoint.tensors:
        return {}
    if size > vocab_size:
        raise UserError(
            f"{checkpoint.weights}: d2t holds {size} tokens of a vocabulary of {vocab_size}"
        )
    d2t = checkpoint.load("d2t").long()
    ids = torch.arange(len(d2t)) + d2t
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise UserError(f"{checkpoint.weights}: d2t points outside the vocabulary of {vocab_size}")
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    if int(known.sum()) != len(ids):
        raise UserError(f"{checkpoint.weights}: d2t points to some token twice")
    if "t2d" in checkpoint.tensors:
        checkpoint.shape("t2d", 1)
        stored = checkpoint.load("t2d").bool()
        # Either vocabulary may be padded, with numbers that are no tokens.
        if not torch.equal(stored.nonzero(), known.nonzero()):
            raise UserError(f"{checkpoint.weights}: t2d marks other tokens than d2t points to")
    return {"d2t": d2t, "t2d": known}


# Writing


def layer_keys(config: LayerConfig, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The configuration keys that describe draft layers, for transformers 4 and 5."""
    rope = dict(config.rope_parameters or {})
    theta = float(rope.setdefault("rope_theta", DEFAULT_THETA))
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = rope.setdefault("rope_type", "default") == "default"
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": num_layers,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": None if plain else scaled,
        "rope_parameters": rope,
    }


def with_output_bias(tensors: Tensors) -> Tensors:
    """The tensors [...] and, where queries have a bias, an attention output bias of 0."""
    # Readers with a single option `attention_bias` expect both biases or neither.
    added = {}
    for name in tensors:
        if name.endswith("self_attn.q_proj.bias"):
            layer = name.removesuffix("self_attn.q_proj.bias")
            weight = tensors[layer + "self_attn.o_proj.weight"]
            added[layer + OUTPUT_BIAS] = weight.new_zeros(len(weight))
    return {**tensors, **added}


# Arithmetic of the readers, on stored tensors


class PlainLayers:
    """Llama's and Qwen3's layers from a configuration and tensors as stored, in float32."""

    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.config, self.tensors = config, tensors
        self.eps = config["rms_norm_eps"]
        self.head_dim = config["head_dim"]

    def norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """The norm called `name` of hidden [..., D]."""
        return rms_norm(hidden, hidden.shape[-1:], self.tensors[name + ".weight"], self.eps)

    def linear(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """The linear map called `name` of hidden [..., D]."""
        product = hidden @ self.tensors[name + ".weight"].T
        bias = self.tensors.get(name + ".bias")
        return product if bias is None else product + bias

    def mlp(self, layer: str, hidden: torch.Tensor) -> torch.Tensor:
        """The gated feed-forward part of a layer with its norm and residual, of hidden [T, D]."""
        normed = self.norm(layer + "post_attention_layernorm", hidden)
        gate = silu(self.linear(layer + "mlp.gate_proj", normed))
        inner = gate * self.linear(layer + "mlp.up_proj", normed)
        return hidden + self.linear(layer + "mlp.down_proj", inner)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Heads [T, H, head_dim] rotated to positions [T]; halves are paired as in transformers."""
        frequencies, scaling = self._frequencies()
        angles = torch.outer(positions.float(), frequencies)[:, None]  # [T, 1, head_dim / 2]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        rope = self.config["rope_parameters"]
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
            return rope["rope_theta"] ** -exponents, 1.0
        keys = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        shape = LlamaConfig(**{key: self.config[key] for key in keys}, rope_parameters=rope)
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](shape, torch.device("cpu"))

    def heads(self, layer: str, part: str, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values [T, H, head_dim] of hidden [T, D], normed if there is a norm."""
        found = self.linear(f"{layer}self_attn.{part}_proj", hidden)
        found = found.unflatten(-1, (-1, self.head_dim))
        name = f"{layer}self_attn.{part}_norm"
        return self.norm(name, found) if name + ".weight" in self.tensors else found

    def attention(
        self,
        layer: str,
        seen: torch.Tensor,  # [S, D] input of keys and values
        places: torch.Tensor,  # [S] their positions
        hidden: torch.Tensor,  # [T, D] input of queries
        positions: torch.Tensor,  # [T]
        mask: torch.Tensor,  # [T, S] bool
    ) -> torch.Tensor:
        """The output [T, D] of a layer's attention."""
        queries = self.rotate(self.heads(layer, "q", hidden), positions)
        keys = self.rotate(self.heads(layer, "k", seen), places)
        values = self.heads(layer, "v", seen)
        # [1, H, T, head_dim] each
        queries, keys, values = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        [found] = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        return self.linear(layer + "self_attn.o_proj", found.transpose(0, 1).flatten(1))

    def decoder_layer(self, layer: str, hidden: torch.Tensor) -> torch.Tensor:
        """A whole causal layer over hidden [T, D] at positions 0 to T - 1."""
        # EAGLE's first layer has no first norm.
        has_norm = layer + "input_layernorm.weight" in self.tensors
        normed = self.norm(layer + "input_layernorm", hidden) if has_norm else hidden
        places = torch.arange(len(hidden))
        past = torch.ones(len(hidden), len(hidden), dtype=torch.bool).tril()
        hidden = hidden + self.attention(layer, normed, places, normed, places, past)
        return self.mlp(layer, hidden)


def spread_over(logits: torch.Tensor, tensors: Tensors, vocab_size: int) -> torch.Tensor:
    """Logits [..., Vd] of a draft vocabulary as [..., V], -inf for tokens outside it."""
    if "d2t" not in tensors:
        return logits
    ids = torch.arange(logits.shape[-1]) + tensors["d2t"].long()
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return full.index_copy(-1, ids, logits)
