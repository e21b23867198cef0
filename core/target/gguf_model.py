"""The model and the tokenizer of a GGUF file, made from its keys and tensors as they lie."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.files import write_json
from drafthead.core.storage.mapped_files import let_go
from drafthead.core.target.block_modules import keeps_blocks, put_blocks
from drafthead.core.target.blocks import KINDS, Blocks
from drafthead.core.target.gguf_account import (
    check_keys,
    config_of,
    end_ids,
    tokenizer_of,
)
from drafthead.core.target.gguf_header import GgufFile, Tensor
from drafthead.core.target.gguf_rope import FACTOR_TENSORS, apply_rope

logger = logging.getLogger(__name__)

ROWS = 64  # that are dequantised at a time
PLAIN = "F32", "F16", "BF16"
EMBEDDING = "token_embd.weight"
SAMPLED = 2  # rows of a tensor that the package `gguf` reads as well
# Experts are one tensor for each matrix in a file; a model has gates and ups one above the other.
GATES, UPS = "ffn_gate_exps", "ffn_up_exps"
EXPERT_NAMES = {GATES: "gate_up_proj", UPS: "gate_up_proj", "ffn_down_exps": "down_proj"}
ROTATED = "attn_q", "attn_k"
NORMS_PLUS_ONE = "gemma2", "gemma3", "nemotron"
# GPT-2's matrices have the inputs first.
TRANSPOSED = "attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"


def describe(path: Path, folder: Path) -> dict[str, Any]:
    """Write what a file says of its model, but for the weights, into a folder, as transformers has
    it: configuration, tokenizer and chat template.

    Returns what became of each key; raises UserError for one that the model would not follow.
    """
    file = GgufFile(path)
    try:
        return described(file, folder)
    except (UserError, OSError):
        raise
    except Exception as error:  # of values of a wrong type or size, of any kind
        raise UserError(
            f"{path} cannot be read: what its keys say is no model ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


def described(file: GgufFile, folder: Path) -> dict[str, Any]:
    """`describe` for a file whose keys may have any values; raises errors of any kind."""
    config = config_of(file)
    apply_rope(file, config)
    generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id = end_ids(file) or None
    tokenizer = tokenizer_of(file)
    neutral = check_keys(file)
    for part in (config, generation, tokenizer):
        part.save_pretrained(folder)
    state_added_tokens(tokenizer, folder / "tokenizer_config.json")
    return {
        "architecture": file.architecture,
        "weights": len(file.tensors),
        "rope": getattr(config, "rope_parameters", None),
        "ends": end_ids(file),
        "keys_used": sorted(file.used),
        "keys_neutral": sorted(neutral),
    }


def state_added_tokens(tokenizer: PreTrainedTokenizerFast, config: Path) -> None:
    """Write the added tokens into a tokenizer's configuration, as older transformers did.

    Without them transformers looks for them in the whole vocabulary at each start.
    """
    added = {str(n): token.__getstate__() for n, token in tokenizer.added_tokens_decoder.items()}
    settings = json.loads(config.read_text(encoding="utf-8"))
    write_json(config, {**settings, "added_tokens_decoder": added})


def load(path: Path, description: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model of a file that `describe` has described, with weights of a type; None: as they lie.

    Then matrices stay in the file's blocks, where there are modules for these, and the others are
    in bfloat16. Raises UserError for a tensor that has no place, and for a weight without one.
    """
    file, config = GgufFile(path), AutoConfig.from_pretrained(description)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype or torch.bfloat16
        )
    places = places_of(file, model, config)
    tensors = {name: of for name, of in file.tensors.items() if name not in FACTOR_TENSORS}
    if left_over := [name for name in tensors if name not in places]:
        raise UserError(
            f"{path} cannot be read: {type(config).__name__} has no place for "
            f"{len(left_over)} of its tensors, such as {left_over[0]}"
        )
    others = []  # in blocks in the file alone
    for name in tqdm(tensors, desc=f"reading {path.name}", delay=3, leave=False):
        tensor = in_our_order(file, config, name, tensors[name])
        check(file, name, tensor)
        if dtype is None and tensor.kind in KINDS and can_stay(model, places[name]):
            for place in places[name]:
                put_blocks(model, place.removesuffix(".weight"), Blocks(tensor.kind, tensor.raw))
        else:
            put_values(file, model, name, places[name], tensor)
            others += [] if tensor.kind in PLAIN else [name]
        let_go(tensors[name].raw)
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise UserError(f"{path} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    if dtype is None and others:
        logger.info(
            "%s: %d tensors do not stay in their blocks, but become bfloat16 numbers: %s",
            *(path, len(others), ", ".join(others)),
        )
    model.generation_config = GenerationConfig.from_pretrained(description)
    return model


def can_stay(model: nn.Module, places: list[str]) -> bool:
    """Whether all weights of these names can be those of modules with blocks."""
    modules = (place.rpartition(".") for place in places)
    return all(end == "weight" and keeps_blocks(model.get_submodule(of)) for of, _, end in modules)


def places_of(
    file: GgufFile, model: PreTrainedModel, config: PreTrainedConfig
) -> dict[str, list[str]]:
    """Of each tensor that a file may hold, the names of the weights that it is in."""
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    head = model.get_output_embeddings()
    places: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        tied = config.tie_word_embeddings and module is head
        for tensor in [EMBEDDING] if tied else names_in_file(name, names):
            places.setdefault(tensor, []).append(name)
    return places


def names_in_file(name: str, names: Any) -> Iterator[str]:
    """The tensors of a file that a weight of transformers is made of."""
    stem, dot, ending = name.rpartition(".")
    if stem.endswith("mlp.experts"):
        layer = stem.split(".")[2]
        yield from (
            f"blk.{layer}.{part}.weight" for part, of in EXPERT_NAMES.items() if of == ending
        )
    elif (known := names.get_name(stem)) is not None:
        yield f"{known}{dot}{ending}"


def in_our_order(file: GgufFile, config: Any, name: str, tensor: Tensor) -> Tensor:
    """A tensor [N, K] with its rows as transformers has them.

    Llama's files have both numbers of a rotated pair side by side, and not half a head apart: rows
    0 to 3 of a head of 4 become rows 0, 2, 1, 3.
    """
    if file.architecture != "llama" or not any(f".{part}." in name for part in ROTATED):
        return tensor
    heads = config.num_attention_heads if ROTATED[0] in name else config.num_key_value_heads
    pairs = tensor.raw.view(heads, -1, 2, *tensor.raw.shape[1:])
    return Tensor(tensor.kind, pairs.transpose(1, 2).reshape(tensor.raw.shape))


def check(file: GgufFile, name: str, tensor: Tensor) -> None:
    """Compare rows of a tensor [..., N, K] in blocks with what the package `gguf` makes of them;
    UserError where it is something else.
    """
    if tensor.kind not in KINDS:
        return
    flat = Tensor(tensor.kind, tensor.raw.flatten(0, -2))
    rows = torch.linspace(0, len(flat.raw) - 1, SAMPLED).long()
    if not torch.equal(Blocks(flat.kind, flat.raw).rows(rows), flat.values(rows)):
        raise UserError(f"{file.path} cannot be read: the package gguf reads {name} differently")


def put_values(
    file: GgufFile, model: nn.Module, name: str, places: list[str], tensor: Tensor
) -> None:
    """Dequantise a tensor [...] into the weight of these names, or the part of it that it is."""
    owners = [(model.get_submodule(of), end) for of, _, end in (p.rpartition(".") for p in places)]
    weight: Any = getattr(*owners[0])
    if weight.is_meta:
        weight = nn.Parameter(torch.empty_like(weight, device="cpu"), requires_grad=False)
    for module, ending in owners:
        setattr(module, ending, weight)
    part = part_of(name, weight.data)
    if file.architecture == "gpt2" and name.endswith(TRANSPOSED):
        part = part.T
    minus = float(file.architecture in NORMS_PLUS_ONE and name.endswith("norm.weight"))
    parts, raws = (at.view(-1, at.shape[-1]) if at.dim() < 2 else at for at in (part, tensor.raw))
    if parts.dim() == 2:
        parts, raws = parts[None], raws[None]
    for values, raw in zip(parts, raws, strict=True):  # of an expert each
        for some in (slice(start, start + ROWS) for start in range(0, len(raw), ROWS)):
            found = Tensor(tensor.kind, raw[some])
            ours = tensor.kind in KINDS
            values[some] = Blocks(*found).rows(slice(None)) if ours else found.values() - minus


def part_of(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that a tensor is: of gates and ups [E, 2F, D] one half."""
    half = weight.shape[1] // 2 if weight.dim() == 3 else 0
    if GATES in name:
        return weight[:, :half]
    return weight[:, half:] if UPS in name else weight
