"""The name of the machine in reports: of two that are called alike, what they can is said."""

import pytest
import torch

from drafthead.infer import machine


@pytest.mark.parametrize(
    ("capability", "has", "expected"),
    [
        ("AVX2", {"avx2": True}, "AVX2"),
        ("AVX512", {"avx512_bf16": True, "amx_bf16": False}, "AVX512-BF16"),
        ("AVX512", {"avx512_bf16": True, "amx_bf16": True}, "AVX512-AMX"),
    ],
)
def test_a_processors_instructions_are_said(
    monkeypatch, capability: str, has: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.processor_name().endswith(f"({expected})")
