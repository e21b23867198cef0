"""What is said of a processor that converts every bfloat16 number."""

import pytest
import torch

from drafthead.heads import processor

CPU, GPU = torch.device("cpu"), torch.device("cuda")


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
