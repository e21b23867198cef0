"""A CUDA graph's stand-in without a GPU: what it does to memory, by calling the function again."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from drafthead.backends.cuda import recorded
from drafthead.backends.cuda.recorded import WARM_UPS
from drafthead.core.kv_cache.cache_memory import CacheMemory


class Rehearsal:
    """Stands for a CUDA graph: a repetition overwrites the values of the one before."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(
        self, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        # A graph holds addresses and no tensors, so what counts its references may not see it.
        arguments = tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, arguments)
        for _ in range(WARM_UPS):
            function(*arguments)
        value = function(*arguments)

        def replay() -> None:
            pairs = zip(tree_leaves(value), tree_leaves(function(*arguments)), strict=True)
            for old, new in pairs:
                if torch.is_tensor(old):
                    old.copy_(new)

        return replay, value


def rehearse(monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """Let every graph be recorded by a stand-in from now on; gives it."""
    stand_in = Rehearsal()
    monkeypatch.setattr(recorded, "cuda_graph", stand_in)
    monkeypatch.setattr(CacheMemory, "on", lambda _: CacheMemory())
    return stand_in
