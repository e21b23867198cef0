"""What only a GPU can show: `pytest -m gpu`."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import placed, random_prompts, tiny_llama

from drafthead.backends.cuda.recorded import Recorded, Recording
from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.core import host
from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.lab.exactness.oracle import OracleDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def gpu_target() -> Target:
    """The target of most tests, on the GPU."""
    model = tiny_llama(0, eos_token_id=7, pad_token_id=0)
    return Target(model.cuda())


@pytest.fixture
def strict_waiting(monkeypatch) -> Iterator[None]:
    """Where waiting for the GPU is an error, it is none in `to_host`."""
    real = host.to_host

    def waiting(numbers: torch.Tensor) -> list:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return real(numbers)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    for module in list(sys.modules.values()):
        if getattr(module, "to_host", None) is real:
            monkeypatch.setattr(module, "to_host", waiting)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
def test_greedy_text_is_that_of_plain_decoding(
    drafter_name: str,
    compiled: bool,
    gpu_target: Target,
    make_target: Callable[..., Target],
    make_drafter: Callable[[str, Target], Drafter],
) -> None:
    drafter = placed(make_drafter(drafter_name, make_target(seed=0)), torch.device("cuda"))
    prompts = random_prompts(5)
    expected = OracleDecoder(gpu_target).generate(prompts, max_new_tokens=24).sequences
    # The tree kernel in every head; compiled layers and growth in one, as each takes seconds.
    fuses = drafter_name == "eagle3:own"
    target = RecordedTarget(gpu_target, fuses=fuses) if compiled else gpu_target
    if compiled:
        drafter.compile(target)
    assert Decoder(target, drafter).generate(prompts, max_new_tokens=24).sequences == expected


@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": [1, 2, 3]}])
def test_steps_wait_for_the_gpu_once(
    law: dict[str, Any], gpu_target: Target, strict_waiting: None
) -> None:
    decoder = Decoder(RecordedTarget(gpu_target))
    steps = decoder.steps(random_prompts(3), max_new_tokens=64, **law)
    for _ in range(20):  # the prompt, compiling and recording
        next(steps)
    torch.cuda.set_sync_debug_mode("error")
    assert [len(next(steps)) for _ in range(20)] == [3] * 20, "every row, without another wait"


def test_a_second_answer_makes_no_recording(gpu_target: Target, monkeypatch) -> None:
    decoder = Decoder(RecordedTarget(gpu_target))
    prompts = random_prompts(3)
    first = decoder.generate(prompts, max_new_tokens=64)
    made: list[Recording] = []
    real = Recording.__init__

    def noted(self: Recording, *given: object) -> None:
        made.append(self)
        real(self, *given)

    monkeypatch.setattr(Recording, "__init__", noted)
    second = decoder.generate(prompts, max_new_tokens=64)
    assert (made, second.sequences) == ([], first.sequences)


def test_recordings_can_be_made_while_only_a_result_of_older_ones_is_left() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for size in range(3, 6):
        calls = Recorded(double, held=[])
        found = calls(torch.ones(size, device="cuda"))
        assert calls.failures == 0 and found.tolist() == [2.0] * size
        kept = next(iter(calls.recordings.values())).value  # in the recordings' memory
        del calls
    assert kept.shape == (5,)
