"""What a processor can do, and what is said of one that converts every bfloat16 number."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama

from drafthead.core.target import processor
from drafthead.infer import Decoder
from drafthead.infer.timing.machine import processor_name

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


def threads_now() -> int:
    """Living threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(processor.OPENMP is None, reason="torch has another library for threads")
@pytest.mark.parametrize(
    "work", [processor.end_helpers, lambda: Decoder.from_pretrained(tiny_llama())]
)
def test_a_thread_that_has_loaded_a_model_keeps_no_helpers(work: Callable[[], object]) -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()  # enough for two threads
    before = threads_now()
    work()
    until = time.monotonic() + 10
    while threads_now() >= before and time.monotonic() < until:
        time.sleep(0.01)  # they end by themselves
    assert threads_now() < before
    assert torch.get_num_threads() == 2
    torch.testing.assert_close(torch.ones(1 << 20).exp().mean(), torch.tensor(1.0).exp())
