"""The weights of a GGUF file's copy, compared with the file tensor by tensor.

transformers makes the copy; here the package `gguf` reads the file a second time, and what
llama.cpp's converter does to a tensor is undone as its source has it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from drafthead.heads.errors import UserError
from drafthead.heads.target.gguf_account import GgufFile
from drafthead.heads.target.gguf_rope import FACTOR_TENSORS

Values = NDArray[np.float32]
# Experts are one tensor for each matrix in a file; a model has gates and ups one above the other.
GATES, UPS = "ffn_gate_exps", "ffn_up_exps"
EXPERT_NAMES = {GATES: "gate_up_proj", UPS: "gate_up_proj", "ffn_down_exps": "down_proj"}


def check_weights(
    file: GgufFile, weights: Mapping[str, torch.Tensor], config: PreTrainedConfig
) -> int:
    """Compare a copy's weights with a file's tensors; gives the number of those compared.

    Raises UserError, naming it, for a tensor that the copy does not hold or holds otherwise.
    """
    from gguf import dequantize

    places = places_of(file, weights, config)
    tensors = {name: t for name, t in file.tensors().items() if name not in FACTOR_TENSORS}
    if left_over := [name for name in tensors if name not in places]:
        raise UserError(
            f"{file.path} cannot be copied: {type(config).__name__} has no place for "
            f"{len(left_over)} of its tensors, such as {left_over[0]}"
        )
    for name, tensor in tensors.items():
        stored = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        held = part_of(name, weights[places[name]])
        undone = torch.from_numpy(np.array(undo(file, config, name, stored)))
        if not torch.equal(undone.to(held.dtype).reshape(held.shape), held):
            raise UserError(
                f"{file.path} cannot be copied: transformers reads {name} otherwise than gguf does"
            )
    return len(tensors)


def places_of(
    file: GgufFile, weights: Mapping[str, torch.Tensor], config: PreTrainedConfig
) -> dict[str, str]:
    """Of each tensor that a file may hold, the name of the weight that it is in."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    places: dict[str, str] = {}
    for name in weights:
        stem, dot, ending = name.rpartition(".")
        if ending in ("gate_up_proj", "down_proj") and stem.endswith("mlp.experts"):
            layer = stem.split(".")[2]
            found = [part for part, ours in EXPERT_NAMES.items() if ours == ending]
            places |= {f"blk.{layer}.{part}.weight": name for part in found}
        elif (known := names.get_name(stem)) is not None:
            places[f"{known}{dot}{ending}"] = name
    return places


def part_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that a tensor is: of gates and ups [E, 2F, D] one half."""
    half = weight.shape[1] // 2 if weight.dim() == 3 else 0
    if GATES in name:
        return weight[:, :half]
    return weight[:, half:] if UPS in name else weight


def undo(file: GgufFile, config: PreTrainedConfig, name: str, stored: Values) -> Values:
    """A tensor as transformers has it."""
    change = CHANGES.get(file.architecture)
    return stored if change is None else change(name, stored, config)


def rotary_halves(name: str, stored: Values, config: Any) -> Values:
    """Llama: both numbers of a rotated pair are side by side in a file, and half a head apart here.

    Rows 0 to 3 of a head of 4 become rows 0, 2, 1, 3.
    """
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = next((heads[key] for key in heads if f".{key}." in name), None)
    if part is None:
        return stored
    return stored.reshape(part, -1, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)


def centred_norms(name: str, stored: Values, _: Any) -> Values:
    """Gemma and Nemotron: a norm's weight is 1 more in a file."""
    return stored - 1 if name.endswith("norm.weight") else stored


def transposed(name: str, stored: Values, _: Any) -> Values:
    """GPT-2: its layers hold matrices with the inputs first."""
    parts = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return stored.T if name.endswith(parts) else stored


CHANGES: dict[str, Callable[[str, Values, Any], Values]] = {
    "llama": rotary_halves,
    "gemma2": centred_norms,
    "gemma3": centred_norms,
    "nemotron": centred_norms,
    "gpt2": transposed,
}
