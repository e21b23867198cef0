"""Which numbers a run computes with, and what is said where bfloat16 is slower."""

import pytest
import torch

from drafthead.train.learning import engines
from drafthead.train.run import config

CPU = torch.device("cpu")


def warning(monkeypatch, caplog, seconds: dict[torch.dtype, float], mixed: str = "bf16") -> str:
    monkeypatch.setattr(engines, "product_seconds", seconds.__getitem__)
    engines.warn_of_slow_bfloat16(CPU, mixed)
    return caplog.text


def test_a_processor_that_is_slower_in_bfloat16_is_said(monkeypatch, caplog):
    text = warning(monkeypatch, caplog, {torch.bfloat16: 1.8, torch.float32: 1.0})
    assert "1.8 times faster in float32" in text
    assert "train.mixed_precision=no" in text


@pytest.mark.parametrize(("bfloat16", "mixed"), [(0.5, "bf16"), (1.2, "bf16"), (9.0, "no")])
def test_nothing_is_said_where_it_would_not_help(monkeypatch, caplog, bfloat16: float, mixed: str):
    assert not warning(monkeypatch, caplog, {torch.bfloat16: bfloat16, torch.float32: 1.0}, mixed)


def test_a_product_takes_time():
    assert 0 < engines.product_seconds(torch.float32) < 60


@pytest.mark.parametrize(
    ("instructions", "chosen"),
    [({"avx512_bf16": True}, "bf16"), ({"avx2": True, "amx_bf16": False}, "no"), ({}, "no")],
)
def test_auto_is_bf16_on_processors_that_have_instructions_for_it(
    monkeypatch, instructions: dict[str, bool], chosen: str
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert config.precision_here(cpu=True) == chosen


def test_auto_is_bf16_on_gpus_unless_none_is_to_be_used(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert config.precision_here(cpu=False) == "bf16"
    assert config.precision_here(cpu=True) == "no"
