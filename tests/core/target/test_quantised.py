"""Targets that bitsandbytes rounds, or that are stored so: `pip install drafthead[quantized]`."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import BITSANDBYTES
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
@pytest.mark.parametrize("dtype", BITSANDBYTES)
def test_bitsandbytes_that_is_not_installed_is_one_sentence(folder: Path, dtype: str) -> None:
    with pytest.raises(UserError, match=rf"{dtype} needs bitsandbytes.*drafthead\[quantized\]"):
        load_decoder_only(folder, dtype, "cpu")


@needs_bitsandbytes
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.05), ("int4", 0.5)])
def test_rounded_targets_are_near_and_not_the_same(folder: Path, dtype: str, error: float) -> None:
    stored, rounded = (load_decoder_only(folder, d, "cpu") for d in ("bfloat16", dtype))
    assert (rounded.precision, rounded.dtype) == (dtype, torch.bfloat16)
    expected, found = logits_of(stored), logits_of(rounded)
    assert 0 < (found - expected).norm() / expected.norm() < error
    assert weights_fingerprint(rounded) != weights_fingerprint(stored)
    with pytest.raises(UserError, match=f"compile is not available for .* {dtype}"):
        Decoder.from_pretrained(rounded, compile=True)


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", BITSANDBYTES)
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
@pytest.mark.parametrize("dtype", BITSANDBYTES)
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
