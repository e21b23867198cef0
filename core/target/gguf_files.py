"""Targets in GGUF files: dequantised once, into a folder that transformers loads like any other."""

import copy
import hashlib
import importlib.util
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.disk_cache import cache_folder, cache_or_scratch
from drafthead.core.storage.files import write_text
from drafthead.core.target.gguf_account import (
    GgufFile,
    apply_settings,
    check_architecture,
    check_keys,
    end_ids,
    split_as_stated,
)
from drafthead.core.target.gguf_rope import FACTOR_TENSORS, apply_rope

logger = logging.getLogger(__name__)

OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
ACCOUNT_FILE = "gguf.json"  # in a copy: what was read of its file, and what was compared
# Goes up when copies hold more of their files: older ones are made again.
COPY_VERSION = 2
# What `drafthead fetch` brings, each into a folder of its name.
FETCHED_MODELS = ("smollm2", "gemma3-270m")
Values = NDArray[np.float32]
# Experts are one tensor for each matrix in a file; a model has gates and ups one above the other.
GATES, UPS = "ffn_gate_exps", "ffn_up_exps"
EXPERT_NAMES = {GATES: "gate_up_proj", UPS: "gate_up_proj", "ffn_down_exps": "down_proj"}


def model_folder(name: str | Path) -> str | Path:
    """What transformers loads for a target's name: the name itself, unless it means a GGUF file.

    A `.gguf` file, or a folder that holds one and no other weights, gives the folder of its
    bfloat16 copy, which is made the first time. The name of a model that `drafthead fetch` has
    brought means its file, unless a folder here has that name. Raises UserError for a file that is
    missing, damaged or one part of several, or whose architecture transformers cannot read, for a
    folder with several GGUF files, for a model that was not fetched yet, and when the package
    `gguf` is missing.
    """
    file = gguf_of(name)
    return name if file is None else dequantised_folder(file)


def gguf_of(name: str | Path) -> Path | None:
    """The GGUF file that a target's name means, if it means one; UserError as `model_folder`."""
    path = Path(name)
    return gguf_file(fetched_folder(str(name)) if is_fetched_name(path) else path)


def is_fetched_name(path: Path) -> bool:
    """Whether a path is no path here, but the name of a model that `drafthead fetch` brings."""
    return str(path) in FETCHED_MODELS and not path.exists()


def fetched_folder(name: str) -> Path:
    """Where `drafthead fetch` puts a model; raises UserError when it is not there."""
    folder = cache_folder("models") / name
    if not any(folder.glob("*.gguf")):
        raise UserError(
            f"cannot load the model {name}: it is not on this machine yet, "
            f"`drafthead fetch {name}` brings it"
        )
    return folder


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means; None when it means something else."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.exists():
            raise UserError(f"cannot load the model {path}: this file does not exist")
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or any(any(path.glob(pattern)) for pattern in OTHER_WEIGHTS):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{path} holds {len(files)} GGUF files: name one of {names}")
    return files[0]


def dequantised_folder(file: Path) -> Path:
    """The folder of a file's copy, from the cache or written now; UserError as `model_folder`."""
    base = cache_or_scratch("gguf")
    folder = base / f"{file.stem}-{fingerprint(file)}"
    if folder.is_dir():
        return folder
    check_file(file)
    logger.info("%s is dequantised once, into %s", file, folder)
    unfinished = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.tmp")
    unfinished.mkdir()
    try:
        with only_errors_logged():
            write_copy(file, unfinished)
        move_whole(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def move_whole(unfinished: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another process was first."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def fingerprint(file: Path) -> str:
    """16 hexadecimal digits that change with the file and with the software that reads it.

    All of the file is read, several gigabytes a second: two fine-tunes may differ in some weights
    alone, and have the times that an archive gave them.
    """
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
    software = f"{transformers.__version__} {gguf_version()} {COPY_VERSION}"
    return hashlib.blake2b(f"{content} {software}".encode(), digest_size=8).hexdigest()


def gguf_version() -> str:
    """The version of the package `gguf`; empty where it is missing."""
    try:
        return version("gguf")
    except PackageNotFoundError:
        return ""


def check_file(file: Path) -> None:
    """Raise UserError for a file that is no whole GGUF file, or one that cannot be read here."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {file} needs the package gguf: python -m pip install gguf")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file: its first four bytes are not GGUF")
    from gguf import GGUFReader

    try:
        parts = GGUFReader(file).get_field("split.count")
    except Exception as error:  # the reader checks nothing, so damage shows as errors of any kind
        raise UserError(
            f"{file} is damaged or was not downloaded to its end ({type(error).__name__}: "
            f"{first_line(error)}): fetch it again"
        ) from error
    if parts is not None and parts.contents() > 1:
        raise UserError(
            f"{file} is one of {parts.contents()} parts: join them with "
            "`llama-gguf-split --merge` and name the result"
        )


def write_copy(path: Path, folder: Path) -> None:
    """Write a file's model in bfloat16 and its tokenizer, with the chat template, into a folder.

    Every key and every tensor is in the copy or known to be neutral, and the weights are those that
    the package `gguf` reads; `ACCOUNT_FILE` in the folder lists it. Raises UserError for what
    transformers cannot read, and for what a copy would not hold.
    """
    file = GgufFile(path)
    check_architecture(file)
    config = read_config(file)
    loaded, tokenizer = read_file(path, config)
    # What transformers has loaded counts as quantised and cannot be saved, so its weights go into
    # another model of the same configuration.
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.generation_config.eos_token_id = end_ids(file) or None
    split_as_stated(file, tokenizer)
    count = check_weights(file, model.state_dict(), config)
    neutral = check_keys(file)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    account = {
        "file": str(path),
        "architecture": file.architecture,
        "weights": count,
        "rope": getattr(config, "rope_parameters", None),
        "ends": end_ids(file),
        "keys_used": sorted(file.used),
        "keys_neutral": sorted(neutral),
    }
    write_text(folder / ACCOUNT_FILE, json.dumps(account, indent=1))


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration of a file's model, with all that the file says; errors as `write_copy`."""
    try:
        config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"transformers cannot read {file.path}: {first_line(error)}") from error
    apply_settings(file, config)
    apply_rope(file, config)
    return config


def read_file(
    file: Path, config: PreTrainedConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A file's model in bfloat16, and its tokenizer; errors as `write_copy`."""
    try:
        pair: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=copy.deepcopy(config), dtype=torch.bfloat16,
            output_loading_info=True,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"transformers cannot read {file}: {first_line(error)}") from error
    model, about = pair
    if missing := sorted(about["missing_keys"]):
        raise UserError(f"{file} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    return model, tokenizer


@contextmanager
def only_errors_logged() -> Iterator[None]:
    """Without transformers' warnings: they advise on packed weights, which are not used here."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def check_weights(
    file: GgufFile, weights: Mapping[str, torch.Tensor], config: PreTrainedConfig
) -> int:
    """Compare a copy's weights with a file's tensors; gives the number of those compared.

    transformers has made the copy; here the package `gguf` reads the file a second time, and what
    llama.cpp's converter does to a tensor is undone as its source has it. Raises UserError, naming
    it, for a tensor that the copy does not hold or holds otherwise.
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
                f"{file.path} cannot be copied: transformers and gguf read {name} differently"
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
