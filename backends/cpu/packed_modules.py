"""Modules that run our kernels in place of those of a model: a twin of it, with the same weights.

Any product of bfloat16 weights reads packed ones, attention is found in transformers' registry, and
norms and rotary positions are computed by kernels where theirs are known. A decoder layer of a
known class is one call. What is not known stays as it is.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from drafthead.backends.cpu.kernels.operations import LARGEST_HEAD, NORM_MULTIPLE
from drafthead.backends.cpu.kernels.packing import pack_blocks
from drafthead.backends.cpu.substitutions import added, can_be_packed, has_mask
from drafthead.backends.cpu.threads import threads
from drafthead.core.target.block_modules import BlockLinear, InBlocks
from drafthead.core.target.features import Features
from drafthead.core.target.int8 import LONGEST, Int8Linear
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.target.weight_state import weights_of

ATTENTION = "drafthead_cpu"
# Layers that compute what Llama's do, some with a bias or with norms of queries and keys.
LLAMAS = "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3"
LLAMA_LAYERS = {f"{name}DecoderLayer" for name in LLAMAS}
LLAMA_DECODERS = {f"{name}Model" for name in LLAMAS}
# Rotary positions whose frequencies are the same however long the text is.
FIXED_FREQUENCIES = {"default", "linear", "llama3", "yarn"}
ops = torch.ops.drafthead


Product = nn.Linear | BlockLinear


class PackedLinear(nn.Module):
    """A product by packed weights."""

    def __init__(self, product: Product, in_int8: bool):
        """With `in_int8` it is a product of whole numbers, whatever it was."""
        super().__init__()
        self.weight, self.bias, self.out_features = (
            product.weight,
            product.bias,
            product.out_features,
        )
        self.packed = packed_weights_of([product], in_int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K]
        """The product [..., N]."""
        return ops.linear(x, self.packed, self.out_features, self.bias)


def packed_weights_of(
    products: Sequence[Product], in_int8: bool, paired: bool = False
) -> torch.Tensor:
    """The weights [N / 32, ...] of products of one input as the kernel reads them, see `pack`."""
    if blocks := [product.blocks for product in products if isinstance(product, BlockLinear)]:
        return pack_blocks(blocks, paired)
    weights = [product.weight for product in products]
    made: torch.Tensor = ops.pack(weights, paired, is_read_in_int8(products[0], in_int8))
    return made


class PackedNorm(nn.Module):
    """A root mean square norm."""

    def __init__(self, weight: torch.Tensor, eps: float, plus_one: bool):
        """For a weight [D], which is stored less one if `plus_one`."""
        super().__init__()
        self.weight, self.eps, self.plus_one = weight, eps, plus_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., D]
        """The normalised numbers [..., D]."""
        return ops.rms_norm(x, self.weight, self.eps, self.plus_one)


class PackedRotations(nn.Module):
    """Rotary positions of fixed frequencies."""

    def __init__(self, frequencies: torch.Tensor, scale: float):
        """For frequencies [D / 2]."""
        super().__init__()
        self.register_buffer("inv_freq", frequencies.float(), persistent=False)
        self.scale = float(scale)

    def forward(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,  # [B, T]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [B, T, D]; x has their type."""
        return ops.rotations(position_ids, self.inv_freq, self.scale)


class PackedLayer(nn.Module):
    """A decoder layer of Llama's kind, over a cache with room for the new tokens."""

    def __init__(self, layer: Any, in_int8: bool):
        """For a layer of which `is_llama_layer` holds."""
        super().__init__()
        self.number = layer.self_attn.layer_idx
        self.eps, self.scale = layer.input_layernorm.variance_epsilon, layer.self_attn.scaling
        self.weights = layer_weights(layer, layer.input_layernorm.weight, in_int8)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, D]
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin [B, T, head]
        cache: Any = None,
        past_key_values: Any = None,  # as older versions of transformers call it
        **_: object,
    ) -> torch.Tensor:
        """The layer's output [B, T, D]."""
        of = past_key_values if cache is None else cache
        states = of.places([self.number], hidden_states.shape[1])
        how = attention_mask, *states, self.weights, self.eps, self.scale, [0]
        return ops.decoder_layers(hidden_states, *position_embeddings, *how)[0]


def layer_weights(layer: Any, input_norm: torch.Tensor, in_int8: bool) -> list[torch.Tensor]:
    """The tensors that the kernel reads of a layer, see `operations.decoder_layer`; `input_norm` is
    the weight [D] of its first norm.
    """
    attention, mlp = layer.self_attn, layer.mlp
    products = attention.q_proj, attention.k_proj, attention.v_proj
    nothing = input_norm.new_empty(0)
    biases = [product.bias for product in products]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    def pack(*given: Product, paired: bool = False) -> torch.Tensor:
        return packed_weights_of(given, in_int8, paired)

    return [
        input_norm,
        pack(*products),
        nothing if biases[0] is None else torch.cat(biases),
        *(nothing if norm is None else norm.weight for norm in norms),
        pack(attention.o_proj),
        nothing if attention.o_proj.bias is None else attention.o_proj.bias,
        layer.post_attention_layernorm.weight,
        pack(mlp.gate_proj, mlp.up_proj, paired=True),
        pack(mlp.down_proj),
    ]


class PackedDecoder:
    """The decoder of a model as Llama's, with layers that are alike but for their weights.

    One call runs them, whichever states between them are read.
    """

    def __init__(self, decoder: Any):
        """For a decoder of which `is_llama_decoder` holds."""
        self.embed, self.rotary, self.norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self.numbers = [layer.number for layer in decoder.layers]
        self.weights = [weight for layer in decoder.layers for weight in layer.weights]
        self.eps, self.scale = decoder.layers[0].eps, decoder.layers[0].scale

    def __call__(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        mask: torch.Tensor,  # [B, 1, T, S]
        cache: TreeCache,
        taps: Sequence[int],  # as in `FeatureSpec`
    ) -> Features:
        """The last states [B, T, D], and those of the taps."""
        hidden, count = self.embed(input_ids), len(self.numbers)
        kept = sorted({*taps, count - 1} - {-1, count})
        states = cache.places(self.numbers, input_ids.shape[1])
        how = mask, *states, self.weights, self.eps, self.scale, kept
        made = ops.decoder_layers(hidden, *self.rotary(hidden, position_ids), *how)
        last = self.norm(made[-1])
        by_number = {-1: hidden, **dict(zip(kept, made, strict=True)), count: last}
        return Features(last, tuple(by_number[tap] for tap in taps))


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D], H a multiple of G
    value: torch.Tensor,  # as key
    attention_mask: torch.Tensor | None,  # [B, 1, T, S], bool or added to the scores
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [B, T, H, D] as transformers' layers call it: by our kernel where it can be."""
    asked = {name for name, value in options.items() if value is not None}
    if asked - WITHOUT_EFFECT or not has_mask(query, key, value, attention_mask):
        usual = AttentionInterface()["sdpa"]
        return usual(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    assert attention_mask is not None
    mask, scale = added(attention_mask, query.dtype), scaling or query.shape[-1] ** -0.5
    size = -(-max(query.shape[-1], value.shape[-1]) // NORM_MULTIPLE) * NORM_MULTIPLE
    heads = (wide if wide.shape[-1] == size else padded(wide, size) for wide in (query, key, value))
    found = ops.attend(*heads, mask, scale)[..., : value.shape[-1]]
    return found.transpose(1, 2), None


def padded(states: torch.Tensor, size: int) -> torch.Tensor:
    """Heads [..., D] with zeros up to a size, which change no product."""
    return functional.pad(states, (0, size - states.shape[-1]))


# What models pass beside that makes no difference: what a window hides, the mask says already.
WITHOUT_EFFECT = {"sliding_window", "is_causal", "position_ids", "use_cache"}
AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def twin_of(model: PreTrainedModel, in_int8: bool) -> PreTrainedModel:
    """A model with the same weights, of which our kernels run what they can."""
    twin = with_same_weights(model)
    config = twin.config.get_text_config(decoder=True)
    if model._supports_attention_backend and config._attn_implementation == "sdpa":
        config._attn_implementation = ATTENTION
    for parent, name, part in list(children_in(twin)):
        with threads.for_a_call():  # on a busy machine several would wait for each other
            made = packed(part, in_int8)
        if made is not None:
            parent._modules[name] = made
    return twin


def with_same_weights(module: nn.Module) -> Any:
    """A copy of a module for decoding, whose weights are those of the module."""
    shared = {id(weight): weight for _, weight in weights_of(module)}
    return copy.deepcopy(module, shared).eval()


def is_llama_decoder(decoder: Any) -> bool:
    """Whether a decoder computes what Llama's does, of layers of ours that see the same columns."""
    kind, layers = type(decoder), list(getattr(decoder, "layers", ()))
    return (
        kind.__name__ in LLAMA_DECODERS
        and kind.__module__.startswith("transformers.models.")
        and "forward" not in vars(decoder)
        and len(layers) == decoder.config.num_hidden_layers
        and all(isinstance(layer, PackedLayer) for layer in layers)
        and len({(layer.eps, layer.scale) for layer in layers}) == 1
        and len(set(getattr(decoder.config, "layer_types", None) or [""])) == 1
    )


def children_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The parts of a module with their parents and names; not those within a layer of ours."""
    for name, part in module.named_children():
        yield module, name, part
        if not is_llama_layer(part):
            yield from children_in(part)


def packed(part: nn.Module, in_int8: bool) -> nn.Module | None:
    """The module that takes the place of another; None where it stays."""
    if is_llama_layer(part):
        return PackedLayer(part, in_int8)
    if is_product(part):
        return PackedLinear(part, in_int8)  # type: ignore[arg-type]
    if is_norm(part):
        return norm_like(part)
    if type(part).__name__.endswith("RotaryEmbedding") and has_fixed_frequencies(part):
        return rotations_like(part)
    return None


def is_product(part: nn.Module) -> bool:
    """Whether a module is a product by a matrix and no more, of weights that can be packed."""
    if isinstance(part, BlockLinear):
        return True
    if not isinstance(part, nn.Linear) or type(part) not in (nn.Linear, Int8Linear):
        return False
    return can_be_packed(part.weight, part.weight)


def is_read_in_int8(product: Product, in_int8: bool) -> bool:
    """Whether a product is one of whole numbers, or is to be made one and can be."""
    return isinstance(product, Int8Linear) or (in_int8 and product.in_features <= LONGEST)


def is_norm(part: nn.Module) -> bool:
    """Whether a module is one of transformers' root mean square norms, of a size of ours."""
    weight = getattr(part, "weight", None)
    return (
        type(part).__name__.endswith("RMSNorm")
        and isinstance(weight, nn.Parameter)
        and weight.dtype == torch.bfloat16
        and weight.dim() == 1
        and weight.shape[0] % NORM_MULTIPLE == 0
        and len(list(part.parameters())) == 1
    )


@torch.no_grad()
def norm_like(part: nn.Module) -> PackedNorm | None:
    """A norm that computes what a module does for some numbers; None where none of ours does."""
    weight: torch.Tensor = part.weight  # type: ignore[assignment]
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not isinstance(eps, float):
        return None
    numbers = torch.linspace(-3, 5, 2 * len(weight), dtype=weight.dtype).view(2, -1)
    found = part(numbers)
    for plus_one in (False, True):
        norm = PackedNorm(weight, eps, plus_one)
        if found.dtype == weight.dtype and torch.allclose(norm(numbers), found, 2**-6, 1e-3):
            return norm
    return None


def has_fixed_frequencies(part: nn.Module) -> bool:
    """Whether rotary positions are of frequencies that a text does not change, a multiple of 16."""
    frequencies, kind = getattr(part, "inv_freq", None), getattr(part, "rope_type", None)
    return (
        isinstance(kind, str)
        and kind in FIXED_FREQUENCIES
        and isinstance(frequencies, torch.Tensor)
        and (2 * frequencies.numel()) % NORM_MULTIPLE == 0
        and isinstance(getattr(part, "attention_scaling", None), int | float)
    )


@torch.no_grad()
def rotations_like(part: Any) -> PackedRotations | None:
    """Rotary positions as a module computes them for some positions; None where ours differ."""
    made, places = PackedRotations(part.inv_freq, part.attention_scaling), torch.arange(0, 999, 37)
    x = torch.zeros(1, dtype=torch.bfloat16)
    pairs = zip(part(x, places[None]), made(x, places[None]), strict=True)
    alike = all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=2**-6)
        for a, b in pairs
    )
    return made if alike else None


def is_llama_layer(layer: Any) -> bool:
    """Whether a decoder layer computes what Llama's does, from weights of sizes of ours."""
    kind = type(layer)
    if kind.__name__ not in LLAMA_LAYERS or not kind.__module__.startswith("transformers.models."):
        return False
    norms = [layer.input_layernorm, *norms_after(layer)]
    blocks = [part for part in layer.modules() if isinstance(part, InBlocks)]
    return (
        are_llamas_parts(layer, norms)
        and len({norm.variance_epsilon for norm in norms}) == 1
        and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and len([*layer.named_parameters(), *blocks]) == len(norms) + 7 + biases_of(layer)
    )


def norms_after(layer: Any) -> list[nn.Module]:
    """The norms of a layer that are part of its attention or follow it."""
    within = (getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm"))
    return [layer.post_attention_layernorm, *(norm for norm in within if norm is not None)]


def are_llamas_parts(layer: Any, norms: Sequence[nn.Module]) -> bool:
    """Whether the products and norms of a layer as Llama's are of sizes and types of ours."""
    attention, mlp = layer.self_attn, layer.mlp
    first = [attention.q_proj, attention.k_proj, attention.v_proj]
    gates = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(map(is_product, [*first, attention.o_proj, *gates]))
        and all(map(is_norm, norms))
        and len({(product.bias is None, isinstance(product, InBlocks)) for product in first}) == 1
        and len({isinstance(product, InBlocks) for product in gates[:2]}) == 1
        and all(product.bias is None for product in gates)
        and attention.head_dim % NORM_MULTIPLE == 0
        and attention.head_dim <= LARGEST_HEAD
        and mlp.gate_proj.out_features % NORM_MULTIPLE == 0
    )


def biases_of(layer: nn.Module) -> int:
    """The number of a layer's parameters that are biases."""
    return sum(name.endswith(".bias") for name, _ in layer.named_parameters())
