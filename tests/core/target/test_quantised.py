"""Targets that are rounded as they are loaded, or stored so: by bitsandbytes, or with scales."""

import importlib.util
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from safetensors.torch import load_file, save_file
from tiny import target_folder
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.loading import quantising_options
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import BITSANDBYTES, LOSSY
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.base import HEADS
from drafthead.train.data.packing import collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.features.reading import load_target, read_features
from drafthead.train.learning.step import LossModule
from drafthead.train.run.trainables import new_head
from drafthead.train.settings import TargetConfig

CPU = torch.device("cpu")
IS_INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not IS_INSTALLED, reason="bitsandbytes is not installed")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


folder = target_folder(hidden_size=64, initializer_range=0.1)


def logits_of(target: Target) -> torch.Tensor:
    ids = torch.arange(4, 30)[None]
    positions = torch.arange(26)[None]
    return target.run(ids, positions, None, NO_FEATURES).logits.float()


@pytest.mark.skipif(IS_INSTALLED, reason="bitsandbytes is installed")
@pytest.mark.parametrize("dtype", LOSSY)
def test_bitsandbytes_that_is_not_installed_is_one_sentence(dtype: str) -> None:
    with pytest.raises(UserError, match=rf"{dtype} needs bitsandbytes.*drafthead\[quantized\]"):
        quantising_options(dtype, torch.device("cuda"))


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.1), ("int4", 0.5)])
def test_rounded_targets_are_near_and_not_the_same(folder: Path, dtype: str, error: float) -> None:
    stored, rounded = (load_decoder_only(folder, d, "cpu") for d in ("bfloat16", dtype))
    assert (rounded.precision, rounded.dtype) == (dtype, torch.bfloat16)
    expected, found = logits_of(stored), logits_of(rounded)
    assert 0 < (found - expected).norm() / expected.norm() < error
    assert weights_fingerprint(rounded) != weights_fingerprint(stored)
    if dtype == "int4":
        with pytest.raises(UserError, match="compile is not for weights of"):
            rounded.check_compilable()


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["int4"])
def test_a_model_that_is_stored_rounded_is_loaded_as_it_is(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    settings = BitsAndBytesConfig(**BITSANDBYTES[dtype])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
    model.save_pretrained(tmp_path)
    stored = load_decoder_only(tmp_path, "auto", "cpu")
    assert stored.precision == dtype
    assert logits_of(stored).equal(logits_of(Target(model)))


@pytest.mark.parametrize("dtype", ["int4"])
def test_heads_learn_from_rounded_targets(folder: Path, family: str, dtype: str) -> None:
    target = load_target(TargetConfig(str(folder), dtype), "bf16", 64, CPU)
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    head = new_head(family, HEADS[family].config_class(), target, counts)
    ids = torch.arange(4, 34, dtype=torch.int32)
    tokens = collate([[TokenSequence(ids, ids >= 8)]])
    batch = read_features(target, tokens, head.features_needed, "bf16")
    total, _ = LossModule(head, target, "bf16")(batch)
    total.backward()
    assert total.isfinite()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())


class Scheme(NamedTuple):
    """How a checkpoint stores a matrix; sides of 0 are as long as the matrix."""

    settings: dict[str, Any]
    block: tuple[int, int]
    kind: str = "float"
    scale: str = "weight_scale"
    shape: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous  # of the scales
    beside: tuple[str, ...] = ()  # what else the file has


def compressed(form: str, strategy: str, type: str = "float", bits: int = 8, **more: Any) -> Any:
    """The settings of a checkpoint of compressed-tensors."""
    weights = {"num_bits": bits, "type": type, "symmetric": True, "strategy": strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group": {"targets": ["Linear"], "weights": weights | more}},
    }


def fp8(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic"} | settings


BY_BLOCK = fp8(weight_block_size=[48, 40])  # no side of a matrix is a multiple of it
BY_ROW = compressed("float-quantized", "channel")
SCHEMES = {  # those that the docs name
    "blocks": Scheme(BY_BLOCK, (48, 40), scale="weight_scale_inv"),
    "a matrix": Scheme(fp8(weight_block_size=None), (0, 0), scale="weight_scale_inv",
                       shape=lambda s: s[0, 0]),
    "not said": Scheme(fp8(activation_scheme="static"), (0, 0), shape=torch.Tensor.flatten,
                       beside=("input_scale",)),
    "fbgemm": Scheme({"quant_method": "fbgemm_fp8"}, (1, 0)),
    "mxfp8": Scheme({"quant_method": "mxfp8"}, (1, 32), kind="exponents", scale="weight_scale_inv"),
    "ue8m0": Scheme(fp8(weight_block_size=[48, 40], scale_fmt="ue8m0"), (48, 40),
                    kind="exponents", scale="weight_scale_inv"),
    "tensor": Scheme(compressed("float-quantized", "tensor"), (0, 0), shape=torch.Tensor.flatten,
                     beside=("input_scale", "output_scale")),
    "channel": Scheme(BY_ROW, (1, 0), beside=("input_scale",)),
    "group": Scheme(compressed("naive-quantized", "group", group_size=24), (1, 24)),
    "block": Scheme(compressed("float-quantized", "block", block_structure=[48, 40]), (48, 40)),
    "int8": Scheme(compressed("int-quantized", "channel", "int"), (1, 0), "int"),
    "int4": Scheme(compressed("pack-quantized", "group", "int", 4, group_size=24), (1, 24),
                   "packed"),
}  # fmt: skip


def stored(weight: torch.Tensor, scheme: Scheme) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix in a file, and what they stand for, block by block."""
    rows, columns = (s or n for s, n in zip(scheme.block, weight.shape, strict=True))
    largest = {"int": 127, "packed": 7}.get(scheme.kind, LARGEST)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    numbers, meant = torch.empty_like(weight), torch.empty_like(weight)
    for i, j in itertools.product(*map(range, scales.shape)):
        part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scales[i, j] = weight[part].abs().max() / largest
        if scheme.kind == "exponents":
            scales[i, j] = scales[i, j].log2().ceil().exp2()
        found = weight[part] / scales[i, j]
        is_float = scheme.kind in ("float", "exponents")
        numbers[part] = found.to(torch.float8_e4m3fn).float() if is_float else found.round()
        meant[part] = numbers[part] * scales[i, j]
    if scheme.kind == "exponents":
        scales = (scales.log2() + 127).to(torch.uint8)
    file = {scheme.scale: scheme.shape(scales)} | {name: torch.ones(()) for name in scheme.beside}
    if scheme.kind == "packed":
        spread = functional.pad(numbers.long() + 8, (0, -weight.shape[1] % 8)).unflatten(1, (-1, 8))
        words = sum(spread[..., place] << 4 * place for place in range(8))
        file["weight_packed"] = words.to(torch.int32)
        file["weight_shape"] = torch.tensor(weight.shape)
    else:
        types = {"int": torch.int8}
        file["weight"] = numbers.to(types.get(scheme.kind, torch.float8_e4m3fn))
    return file, meant


def store(folder: Path, to: Path, scheme: Scheme, settings: Any = BY_BLOCK) -> dict[str, Any]:
    """A copy of a model whose layers are stored by a scheme, or as other settings say; returns
    what its matrices are meant to be.
    """
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tensors, meant = load_file(to / "model.safetensors"), {}
    for name in [n for n, t in tensors.items() if t.dim() == 2 and "layers." in n]:
        file, meant[name] = stored(tensors.pop(name).float(), scheme)
        tensors |= {f"{name.removesuffix('weight')}{last}": t for last, t in file.items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    written = config if settings is None else config | {"quantization_config": settings}
    (to / "config.json").write_text(json.dumps(written))
    return meant


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_with_scales_are_read_as_what_they_stand_for(
    name: str, folder: Path, tmp_path: Path
) -> None:
    scheme = SCHEMES[name]
    meant = store(folder, tmp_path, scheme, scheme.settings)
    target = load_decoder_only(tmp_path, "float32", "cpu")
    assert target.precision == "float32" and len(meant) == 14
    for of_weight, value in meant.items():
        torch.testing.assert_close(target.model.get_parameter(of_weight).data, value)
    rounded = load_decoder_only(tmp_path, "bfloat16", "cpu").model.get_parameter(of_weight)
    assert rounded.equal(meant[of_weight].bfloat16())


def test_experts_that_transformers_joins_get_their_own_scales(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "plain")
    meant = store(tmp_path / "plain", tmp_path, SCHEMES["blocks"])
    model = load_decoder_only(tmp_path, "float32", "cpu").model
    up = [meant[f"model.layers.1.mlp.experts.{n}.up_proj.weight"] for n in range(4)]
    found = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").data
    torch.testing.assert_close(found[:, found.shape[1] // 2 :], torch.stack(up))


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_without_their_scales_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    store(folder, tmp_path, scheme, scheme.settings)
    file = tmp_path / "model.safetensors"
    tensors, of_up = load_file(file), f"model.layers.1.mlp.up_proj.{scheme.scale}"
    save_file(tensors | {of_up: torch.ones(7, 3)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.safetensors: .*up_proj.* has scales \[7, 3\]"):
        load_decoder_only(tmp_path, "auto", "cpu")
    del tensors[of_up]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.safetensors lacks the scales of .*1.mlp.up_proj"):
        load_decoder_only(tmp_path, "auto", "cpu")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (compressed("nvfp4-pack-quantized", "tensor_group", bits=4), "the format nvfp4-pack"),
        (compressed("float-quantized", "token"), "the strategy or order .*'token'"),
        (compressed("int-quantized", "channel", "int", actorder="group"), "order of .*'group'"),
        (compressed("pack-quantized", "channel", "int", 3), "pack-quantized of .* 3"),
        (compressed("marlin-24", "channel", "int"), "the format marlin-24"),
        (compressed("int-quantized", "channel", "int", symmetric=False), "the format int-quant"),
        (BY_ROW | {"transform_config": {"R3": {}}}, "transform_config"),
        (BY_ROW | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
        (fp8(weight_block_size=[48, 48]), r"do not fit .* declares: \[\(48, 48\)\]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weights of the method modelopt"),
        (None, r"its files have \S+\.weight_scale, which LlamaForCausalLM does not use"),
    ],
)  # fmt: skip
def test_what_is_not_known_of_stored_weights_is_refused(
    settings: dict[str, Any] | None, reason: str, folder: Path, tmp_path: Path
) -> None:
    store(folder, tmp_path, SCHEMES["channel"], settings)
    with pytest.raises(UserError, match=f"cannot load the model .*{reason}"):
        load_decoder_only(tmp_path, "auto", "cpu")


def test_a_model_with_a_missing_matrix_is_refused(folder: Path, tmp_path: Path) -> None:
    load_decoder_only(folder, "auto", "cpu").model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_decoder_only(tmp_path, "auto", "cpu")
