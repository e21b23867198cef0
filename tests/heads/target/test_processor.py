"""What a processor can do, and what is said of one that converts every bfloat16 number."""

import pytest
import torch

from drafthead.heads.target import processor
from drafthead.infer.machine import processor_name

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "has", "expected"),
    [
        ("AVX2", {"avx2": True}, "AVX2"),
        ("AVX512", {"avx512_bf16": True, "amx_bf16": False}, "AVX512-BF16"),
        ("AVX512", {"avx512_bf16": True, "amx_bf16": True}, "AVX512-AMX"),
    ],
)
def test_two_processors_of_one_name_are_told_apart_by_instructions(
    monkeypatch, capability: str, has: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert processor.instructions() == expected
    assert processor_name().endswith(f"({expected})")


@pytest.mark.parametrize(
    ("device", "dtype", "instructions", "is_said"),
    [
        (CPU, torch.bfloat16, {"avx2": True, "avx512_bf16": False}, True),
        (CPU, torch.bfloat16, {"avx512_bf16": True}, False),
        (CPU, torch.float32, {"avx2": True}, False),
        (GPU, torch.bfloat16, {"avx2": True}, False),
    ],
)
def test_slow_bfloat16_is_said_once_where_there_is_a_remedy(
    monkeypatch, caplog, device, dtype, instructions: dict[str, bool], is_said: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    processor.tell_of_slow_bfloat16.cache_clear()
    for _ in range(2):
        processor.tell_of_slow_bfloat16(device, dtype)
    assert caplog.text.count("--dtype float32") == int(is_said)
