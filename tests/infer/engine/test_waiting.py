"""A step of decoding waits for its device once, or twice beside lookup.

It copies nothing there that is not new.

Seen on torch's meta device, which computes shapes and has no numbers: to read one raises an error,
except through `to_host`, which gives ones or zeros here. So no GPU is needed.
"""

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tiny import placed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafthead.core import host
from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.infer.decoder import Decoder

META = torch.device("meta")
STEPS = 4


def is_there(value: object) -> bool:
    """Whether a value is a tensor on the device; scalars of the host may go anywhere."""
    return torch.is_tensor(value) and value.device == META


def is_here(value: object) -> bool:
    return torch.is_tensor(value) and value.device != META and value.dim() > 0


class Uploads(TorchDispatchMode):
    """Counts operations that take numbers of the host and of the device, or copy them there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, made = tree_leaves((args, kwargs)), tree_leaves(result)
        self.count += any(map(is_here, given)) and any(map(is_there, [*given, *made]))
        return result


class Makings(TorchFunctionMode):
    """Counts tensors that are made of Python numbers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += func in (torch.tensor, torch.as_tensor) and is_there(result)
        return result


@pytest.fixture
def reads(monkeypatch) -> Counter[str]:
    """How often anything was read from the device since the fixture was made."""
    counter: Counter[str] = Counter()
    real = host.to_host

    def ones(numbers: torch.Tensor) -> list:
        counter["to_host"] += 1
        if numbers.is_floating_point():  # a tree with scores, all of whose nodes are under the root
            return torch.zeros(numbers.shape, dtype=numbers.dtype).tolist()
        return torch.ones(numbers.shape, dtype=numbers.dtype).tolist()

    for module in list(sys.modules.values()):
        if getattr(module, "to_host", None) is real:
            monkeypatch.setattr(module, "to_host", ones)
    return counter


def test_a_step_reads_once_and_uploads_nothing(
    drafter_name: str, make_target, make_drafter: Callable[..., Drafter], reads: Counter[str]
) -> None:
    target = make_target(seed=0)
    drafter = make_drafter(drafter_name, target)
    target.model.to(META)
    decoder = Decoder(Target(target.model), placed(drafter, META))

    def counted(tokens: int) -> tuple[int, int]:
        """Reads and uploads of two answers of so many tokens, of which a step gives one."""
        reads.clear()
        with Uploads() as uploads, Makings() as makings:
            decoder.generate([[9, 10, 11, 12], [9, 8]], max_new_tokens=tokens)
        return reads["to_host"], uploads.count + makings.count

    counted(3)  # makes tables, which stay on the device
    short, long = counted(3), counted(3 + STEPS)
    # These find on the host what they propose, or what they read.
    on_the_host = ("lookup", "ngrams", "+store")
    new = STEPS if drafter_name.endswith(on_the_host) else 0
    # The best nodes of a drafter and of lookup are found on the host.
    read = 2 * STEPS if "+" in drafter_name and drafter_name.endswith(on_the_host) else STEPS
    if drafter_name in ("by-text", "other-vocabulary"):  # its text becomes other tokens there
        read = new = 2 * STEPS
    assert (long[0] - short[0], long[1] - short[1]) == (read, new)
