"""Targets that bitsandbytes rounds, or that are stored so: `pip install drafthead[quantized]`.

And those that are stored in fp8.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.target import Target
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.base import HEADS
from drafthead.infer import Decoder
from drafthead.train.data.packing import collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.features.reading import TargetConfig, load_target, read_features
from drafthead.train.learning.step import LossModule
from drafthead.train.run.trainables import new_head

CPU = torch.device("cpu")
IS_INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not IS_INSTALLED, reason="bitsandbytes is not installed")
BLOCK, LARGEST = 16, torch.finfo(torch.float8_e4m3fn).max
BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
BY_ROW = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group": {
            "targets": ["Linear"],
            "weights": FP8 | {"strategy": "channel", "dynamic": False},
            "input_activations": FP8 | {"strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_target(path, hidden_size=64, initializer_range=0.1)
    return path


def logits_of(target: Target) -> torch.Tensor:
    ids = torch.arange(4, 30)[None]
    positions = torch.arange(26)[None]
    return target.run(ids, positions, None, NO_FEATURES).logits.float()


@pytest.mark.skipif(IS_INSTALLED, reason="bitsandbytes is installed")
@pytest.mark.parametrize("dtype", ["int4"])
def test_bitsandbytes_that_is_not_installed_is_one_sentence(folder: Path, dtype: str) -> None:
    with pytest.raises(UserError, match=rf"{dtype} needs bitsandbytes.*drafthead\[quantized\]"):
        load_decoder_only(folder, dtype, "cpu")


@needs_bitsandbytes
@pytest.mark.parametrize(("dtype", "error"), [("int4", 0.5)])
def test_rounded_targets_are_near_and_not_the_same(folder: Path, dtype: str, error: float) -> None:
    stored, rounded = (load_decoder_only(folder, d, "cpu") for d in ("bfloat16", dtype))
    assert (rounded.precision, rounded.dtype) == (dtype, torch.bfloat16)
    expected, found = logits_of(stored), logits_of(rounded)
    assert 0 < (found - expected).norm() / expected.norm() < error
    assert weights_fingerprint(rounded) != weights_fingerprint(stored)
    with pytest.raises(UserError, match=f"compile is not available for .* {dtype}"):
        Decoder.from_pretrained(rounded, compile=True)


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["int4"])
def test_a_model_that_is_stored_rounded_is_loaded_as_it_is(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    rounded = load_decoder_only(folder, dtype, "cpu")
    rounded.model.save_pretrained(tmp_path)
    stored = load_decoder_only(tmp_path, "auto", "cpu")
    assert stored.precision == dtype
    assert logits_of(stored).equal(logits_of(rounded))
    assert weights_fingerprint(stored) == weights_fingerprint(rounded)


@needs_bitsandbytes
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


def store_in_fp8(folder: Path, to: Path, settings: dict[str, Any] | None) -> Path:
    """A copy of the model with matrices of fp8 and scales of blocks, or of rows; settings say so.

    Also writes the same numbers in bfloat16, to `to/numbers`, whose folder it returns.
    """
    own = load_decoder_only(folder, "bfloat16", "cpu").model
    own.save_pretrained(to)
    rows = BLOCK if settings == BY_BLOCK else 1
    stored, name = load_file(to / "model.safetensors"), "_scale" if rows == 1 else "_scale_inv"
    for key, weight in list(stored.items()):
        if weight.dim() == 2 and "layers." in key:
            blocks = weight.float().unfold(0, rows, rows).unfold(1, BLOCK, BLOCK)
            scales = blocks.abs().amax((-1, -2) if rows > 1 else (1, -1, -2)) / LARGEST
            scales = scales.view(weight.shape[0] // rows, -1).bfloat16().float()
            wide = scales.repeat_interleave(rows, 0).repeat_interleave(
                weight.shape[1] // scales.shape[1], 1
            )
            stored[key] = (weight.float() / wide).to(torch.float8_e4m3fn)
            stored[key + name] = scales
            own.get_parameter(key).data.copy_(stored[key].float() * wide)
    save_file(stored, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    written = config if settings is None else config | {"quantization_config": settings}
    (to / "config.json").write_text(json.dumps(written))
    own.save_pretrained(to / "numbers")
    return to / "numbers"


@pytest.mark.parametrize("settings", [BY_BLOCK, BY_ROW], ids=["blocks", "rows"])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_model_that_is_stored_in_fp8_is_read_as_the_numbers_that_it_stands_for(
    settings: dict[str, Any], has_gpu: bool, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    """Where there is a GPU transformers would multiply in fp8, by kernels that it downloads."""
    if settings == BY_ROW:
        pytest.importorskip("compressed_tensors")
    numbers = store_in_fp8(folder, tmp_path, settings)
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: has_gpu)
        there.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        stored = load_decoder_only(tmp_path, "auto", "cpu")
    expected = load_decoder_only(numbers, "auto", "cpu")
    assert (stored.precision, stored.dtype) == ("bfloat16", torch.bfloat16)
    assert logits_of(stored).equal(logits_of(expected))
    assert weights_fingerprint(stored) == weights_fingerprint(expected)


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is not None, reason="it is installed"
)
def test_a_format_whose_package_is_not_installed_is_one_sentence(
    folder: Path, tmp_path: Path
) -> None:
    store_in_fp8(folder, tmp_path, BY_ROW)
    with pytest.raises(UserError, match="cannot load .*: compressed-tensors.* is required"):
        load_decoder_only(tmp_path, "auto", "cpu")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weights of the method modelopt"),
        (None, r"its files have \S+\.weight_scale, which LlamaForCausalLM does not use"),
    ],
)
def test_rounded_weights_whose_scales_would_be_dropped_are_refused(
    settings: dict[str, Any] | None, reason: str, folder: Path, tmp_path: Path
) -> None:
    store_in_fp8(folder, tmp_path, settings)
    with pytest.raises(UserError, match=f"cannot load the model .*{reason}"):
        load_decoder_only(tmp_path, "auto", "cpu")


def test_a_model_with_a_missing_matrix_is_refused(folder: Path, tmp_path: Path) -> None:
    load_decoder_only(folder, "auto", "cpu").model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_decoder_only(tmp_path, "auto", "cpu")
