"""Small models as GGUF files, written as llama.cpp's converters write them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny import CHAT_TEMPLATE, SPECIALS, byte_tokenizer
from transformers import PreTrainedModel

from drafthead.core.target.blocks import KINDS

F32 = gguf.GGMLQuantizationType.F32
TOKENS = len(SPECIALS) + 257  # of a file's vocabulary
# Where the converters of architectures do more than rename.
NORMS_PLUS_ONE = ("gemma2", "gemma3", "nemotron")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's
Writes = Callable[[gguf.GGUFWriter], object]


def random_blocks(kind: str, rows: int, inner: int) -> torch.Tensor:
    """Blocks [rows, bytes] of a matrix [rows, inner], with scales and minima of about 0.01."""
    values, size, _ = KINDS[kind]
    gen = torch.Generator().manual_seed(rows + inner)
    raw = torch.randint(256, (rows, inner // values, size), dtype=torch.uint8, generator=gen)
    factors = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(kind, [0, 2])
    size_of_scale = 0.01 / (32 if kind.endswith("_K") else 1)  # these are factors of scales
    for at in factors:
        scales = torch.randn(rows, inner // values, 1, generator=gen) * size_of_scale
        raw[..., at : at + 2] = scales.half().view(torch.uint8)
    return raw.flatten(1)


def stored_as(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Numbers as a file has them; random ones of the same shape where gguf only reads a kind."""
    if kind.name.endswith("_K"):
        return random_blocks(kind.name, *values.shape).numpy()
    return gguf.quantize(values, kind)


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in GGUF's order: both numbers of a rotated pair side by side."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def add_tokenizer(writer: gguf.GGUFWriter, pre: str | None) -> None:
    """The tokenizer of `tiny.byte_tokenizer` and a merged token more."""
    vocab = byte_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "ab"]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key with a value of the type that converters choose for it."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
           str: writer.add_string, list: writer.add_array}[type(value)]  # fmt: skip
    add(key, value)


def converted(name: str, weight: torch.Tensor, arch: str, config: Any) -> np.ndarray:
    """A weight of transformers as the architecture's converter stores it."""
    values = weight.float().numpy()
    if arch == "llama":
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f"{part}.weight" in name:
                return rotary_order(values, getattr(config, heads))
    if arch in NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return values + 1
    if name.endswith("shared_expert_gate.weight"):
        return values[0]  # of a matrix of one row, llama-quantize keeps the row
    if arch == "gpt2" and name.endswith(TRANSPOSED):
        return np.ascontiguousarray(values.T)
    return values


def pieces(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """The tensors of a file by name."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = converted(name, weight, arch, model.config)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            layer = name.split(".")[2]
            parts = np.split(values, 2, axis=1) if "gate_up" in name else [values]
            kinds = ("ffn_gate_exps", "ffn_up_exps") if "gate_up" in name else ("ffn_down_exps",)
            for part, its in zip(kinds, parts, strict=True):
                found[f"blk.{layer}.{part}.weight"] = np.ascontiguousarray(its)
            continue
        stem, dot, ending = name.rpartition(".")
        found[f"{names.get_name(stem)}{dot}{ending}"] = values
    return found


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    keys: Mapping[str, object],
    kind: gguf.GGMLQuantizationType = F32,
    more: Mapping[str, np.ndarray] = {},  # other tensors
    others: Writes = lambda writer: None,
    pre: str | None = "gpt-2",
) -> PreTrainedModel:
    """Write a model in the type `kind`, matrices only; gives it with the numbers of the file.

    `keys` are those of the architecture.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("small")
    for key, value in keys.items():
        add_key(writer, f"{arch}.{key}", value)
    add_tokenizer(writer, pre)
    others(writer)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stored = kind if weight.dim() > 1 else F32
            rows = weight.T if arch == "gpt2" and name.endswith(TRANSPOSED) else weight
            blocks = stored_as(np.ascontiguousarray(rows), stored)
            rows.copy_(torch.tensor(gguf.dequantize(blocks, stored)))
    for name, values in pieces(model, arch).items():
        stored = kind if values.ndim > 1 else F32
        writer.add_tensor(name, stored_as(values, stored), raw_dtype=stored)
    for name, values in more.items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()
