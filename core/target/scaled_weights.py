"""Weights that checkpoints store as numbers of few bits with scales, read as what they stand for.

Which numbers share a scale follows from the configuration's `quantization_config`, and the shapes
in the files have to agree with it. transformers' own quantisers take it from the shapes, and 1 for
a scale that is missing; as weights stay in few bits there, activations are rounded as well.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

OURS = "drafthead"  # the method of what is read here, among those of transformers
METHODS = "fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors"
FLOATS, WHOLE_NUMBERS, PACKED = "float", "int", "packed int"
KINDS = {"F8_E4M3": FLOATS, "F8_E5M2": FLOATS, "I8": WHOLE_NUMBERS}  # by types of safetensors
FORMATS: dict[Any, set[str]] = {  # of compressed-tensors, and which kinds they hold
    "float-quantized": {FLOATS},
    "int-quantized": {WHOLE_NUMBERS},
    "naive-quantized": {FLOATS, WHOLE_NUMBERS},
    "pack-quantized": {PACKED},
}
BITS = {FLOATS: {8}, WHOLE_NUMBERS: {8}, PACKED: {2, 4, 8}}  # of the last, those that divide 32
SCALES = "weight_scale_inv", "weight_scale"  # both multiply
STORED = "weight", "weight_packed", "weight_shape", *SCALES
# Of activations and of keys and values, which are not rounded here.
NOT_NEEDED = (
    *("input_scale", "input_scale_ub", "activation_scale", "output_scale"),
    *("q_scale", "k_scale", "v_scale"),
)
BIAS = 127  # of exponents that are stored as bytes


class ScaleBlock(NamedTuple):
    """The number of rows and columns of a matrix that share a scale; None for all."""

    rows: int | None
    columns: int | None


class Declared(NamedTuple):
    """A configuration's statement of the weights in its files."""

    blocks: Mapping[str, Sequence[ScaleBlock]]  # that numbers of a kind may have
    bits: int = 0  # of packed integers


def declared(settings: Mapping[str, Any]) -> Declared:
    """The statement of a `quantization_config`; raises ValueError for what is not known."""
    method, block = settings["quant_method"], settings.get("weight_block_size")
    if method == "compressed-tensors":
        return of_groups(settings)
    if method == "fbgemm_fp8":
        return Declared({FLOATS: [ScaleBlock(1, None)]})
    if method == "mxfp8":
        block = block or (1, 32)
    if block is not None:
        return Declared({FLOATS: [ScaleBlock(*block)]})
    # transformers takes 128 where the key is missing, and others one scale for a matrix.
    blocks = [ScaleBlock(None, None), ScaleBlock(128, 128)]
    return Declared({FLOATS: blocks[:1] if "weight_block_size" in settings else blocks})


def of_groups(settings: Mapping[str, Any]) -> Declared:
    """The statement of a configuration of compressed-tensors; raises as `declared`."""
    for name in ("sparsity_config", "transform_config"):
        if (settings.get(name) or {"format": "dense"}) != {"format": "dense"}:
            raise ValueError(f"its weights are not as they are stored ({name})")
    found: dict[str, list[ScaleBlock]] = {}
    bits = {0}
    for group in settings.get("config_groups", {}).values():
        if (weights := group.get("weights")) is None:
            continue
        packing = group.get("format") or settings.get("format")
        kind, size = weights.get("type", "int"), weights.get("num_bits", 8)
        if packing == "pack-quantized":
            kind, bits = f"packed {kind}", bits | {size}
        is_known = kind in FORMATS.get(packing, ()) and size in BITS[kind]
        if not is_known or not weights.get("symmetric", True) or len(bits) > 2:
            raise ValueError(f"the format {packing} of {weights} is not known")
        found.setdefault(kind, []).append(block_of_strategy(weights))
    return Declared(found, max(bits))


def block_of_strategy(weights: Mapping[str, Any]) -> ScaleBlock:
    """The numbers that share a scale by a strategy of compressed-tensors; ValueError for
    strategies and orders that are not known.
    """
    strategies = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, weights.get("group_size")),
        "block": tuple(weights.get("block_structure") or ()),
    }
    block = strategies.get(weights.get("strategy", ""))
    if not block or weights.get("actorder") not in (None, "weight", "static"):
        raise ValueError(f"the strategy or order of {weights} is not known")
    return ScaleBlock(*block)


def block_of(
    shape: Sequence[int], scales: Sequence[int], blocks: Sequence[ScaleBlock]
) -> tuple[int, int] | None:
    """The rows and columns of a block of a matrix [..., N, K] with scales of some shape.

    None where no block fits.
    The last block of a side may be cut: 200 rows in blocks of 128 have two scales.
    """
    rows, columns = shape[-2:]
    fit = set()
    for block in blocks:
        sizes = min(block.rows or rows, rows), min(block.columns or columns, columns)
        counts = [*shape[:-2], math.ceil(rows / sizes[0]), math.ceil(columns / sizes[1])]
        while [*scales] != counts and counts and counts[-1] == 1:
            counts.pop()  # files leave out sides of 1
        if [*scales] == counts or (math.prod(counts) == 1 and [*scales] == [1]):
            fit.add(sizes)
    return fit.pop() if len(fit) == 1 else None


def values(
    numbers: torch.Tensor,  # [..., N, K]
    scales: torch.Tensor,  # of each block
    block: tuple[int, int],  # rows and columns
) -> torch.Tensor:
    """The weights [..., N, K] that numbers and their scales stand for, float32.

    With scales 2 5 of blocks of two columns, 1 1 1 stands for 2 2 5.
    """
    rows, columns = numbers.shape[-2:]
    if scales.dtype == torch.uint8:
        scales = (scales.float() - BIAS).exp2()
    counts = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    wide = scales.float().view(*numbers.shape[:-2], *counts)
    wide = wide.repeat_interleave(block[0], -2)[..., :rows, :]
    return numbers.float() * wide.repeat_interleave(block[1], -1)[..., :columns]


def numbers_in(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """The numbers [..., 32 / bits] of words [...] int32, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return words[..., None] >> shifts & 2**bits - 1


def contents(file: str) -> dict[str, tuple[str, str | None, list[int]]]:
    """Of each tensor of a file the file, the kind of numbers that need scales, and the shape, which
    is that of the numbers also where they are packed.

    Raises ValueError for a file that is not in safetensors.
    """
    if not str(file).endswith(".safetensors"):
        raise ValueError(f"{file} is not in safetensors, as weights with scales have to be")
    found = {}
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (it has no other way)
            stem, _, last = name.rpartition(".")
            part = opened.get_slice(name)
            kind, shape = KINDS.get(part.get_dtype()), part.get_shape()
            if last == "weight_packed":
                kind, shape = PACKED, opened.get_tensor(f"{stem}.weight_shape").tolist()
            found[name] = str(file), None if last in (*SCALES, *NOT_NEEDED) else kind, shape
    return found


def check_files(files: Sequence[str], what: Declared) -> None:
    """Raise ValueError, naming the file and the tensor, where numbers lack their scales, or these
    are not those that are declared.
    """
    found = {name: tensor for file in files for name, tensor in contents(file).items()}
    for name, (file, kind, shape) in found.items():
        stem, _, last = name.rpartition(".")
        if kind is None:
            continue
        scales = [f"{stem}.{each}" for each in SCALES if f"{stem}.{each}" in found]
        if last not in STORED or len(scales) != 1:
            raise ValueError(f"{file} lacks the scales of {name}")
        counts, blocks = found[scales[0]][2], [*map(tuple, what.blocks.get(kind, ()))]
        if block_of(shape, counts, what.blocks.get(kind, ())) is None:
            raise ValueError(
                f"{file}: {name} {shape} has scales {counts}, which do not fit the blocks of "
                f"{kind} that quantization_config declares: {blocks}"
            )


class ToValues(ConversionOps):
    """The first step of transformers' reading: numbers and scales become weights."""

    supports_many_to_many = True  # as it leaves weights alone, for the steps that follow

    def __init__(self, hf_quantizer: "ScaledWeights"):
        self.hf_quantizer = hf_quantizer  # where transformers finds this name it leaves types to us

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Weights by the names of their sources; of a single one by its own."""
        dtype, weights = model.get_parameter_or_buffer(full_layer_name).dtype, {}
        given = {name: t if isinstance(t, list) else [t] for name, t in input_dict.items()}
        for name in [name for name in given if name.endswith(("weight", "weight_packed"))]:
            stem = name.removesuffix("_packed")
            nothing = [None] * len(given[name])
            scales = [given[stem + s[6:]] for s in SCALES if stem + s[6:] in given]
            shapes = given.get(f"{stem}_shape", nothing)
            parts = zip(given[name], *(scales or [nothing]), shapes, strict=True)
            weights[stem] = [self._value(*part).to(dtype) for part in parts]
        return weights if [*weights] != ["weight"] else {full_layer_name: weights["weight"][0]}

    def _value(
        self,
        numbers: torch.Tensor,  # [..., N, K or W]
        scales: torch.Tensor | None,
        shape: torch.Tensor | None,  # [2] of a packed matrix
    ) -> torch.Tensor:
        if scales is None:
            return numbers
        what = self.hf_quantizer.quantization_config.what
        kind = WHOLE_NUMBERS if numbers.dtype == torch.int8 else FLOATS
        if shape is not None:
            columns, kind = numbers_in(numbers, what.bits).flatten(-2), PACKED
            numbers = columns[..., : int(shape[1])] - 2 ** (what.bits - 1)
        block = block_of(numbers.shape, scales.shape, what.blocks[kind])
        assert block is not None  # `check_files`
        return values(numbers, scales, block)


@register_quantization_config(OURS)
class ScaledConfig(QuantizationConfigMixin):
    """The configuration that transformers hands to `ScaledWeights`."""

    dequantize = True  # nothing in few bits stays in the model

    def __init__(self, what: Declared, quant_method: Any = OURS):
        self.what, self.quant_method = what, quant_method


@register_quantizer(OURS)
class ScaledWeights(HfQuantizer):
    """The reader of such checkpoints within transformers."""

    is_trainable = True
    quantization_config: ScaledConfig
    serialized_names = {"weight": [*STORED]}  # noqa: RUF012  (transformers declares it so)

    def is_serializable(self) -> bool:
        """Whether the model can be saved: as any other, in its new type."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] = (), **_: Any
    ) -> None:
        check_files(checkpoint_files, self.quantization_config.what)

    def get_load_operations(self) -> dict[str, Any]:
        """The operations before the conversions of a model."""
        return {"dequantize": ToValues}
