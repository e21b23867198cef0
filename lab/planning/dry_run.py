"""Runs code on tensors without numbers, and counts the bytes that it would hold at once.

Floating-point tensors have a shape, a type and no memory. Whole numbers, and what is computed from
them alone, stay real, since shapes follow from them: which positions are supervised, and masks. So
a step of any size takes seconds, and little memory but for masks. What an operation needs inside
itself is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ATEN = torch.ops.aten
INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)
BY_CHANCE = (ATEN.rand.default,)  # what heads choose their positions by


class Ledger:
    """The bytes of all storages that are alive, by label: now, and when they were most."""

    def __init__(self, label: Callable[[torch.Tensor], str]):
        """`label` names a new tensor."""
        self.label = label
        self.live: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor [...], if it is new, under its name."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        name, size = self.label(tensor), storage.nbytes()
        self.live[name] += size
        weakref.finalize(storage, self._drop, name, size).atexit = False
        if self.live.total() > self.at_peak.total():
            self.at_peak = Counter(self.live)

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self.at_peak = Counter(self.live)

    def _drop(self, name: str, size: int) -> None:
        self.live[name] -= size


class DryRun(TorchDispatchMode):
    """While it is entered, new floating-point tensors have no numbers, and a ledger counts all.

    Raises torch's DynamicOutputShapeException or DataDependentOutputException where the code asks
    for a number that nobody has computed.
    """

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = self._run(func, args, kwargs or {})
        for tensor in tensors_of(output):
            self.ledger.add(tensor)
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_of((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return self._without_numbers(func, args, kwargs)
        if inputs or func in BY_CHANCE:
            return func(*args, **kwargs)
        with self.fake:
            output = func(*args, **kwargs)
        if any(tensor.is_floating_point() for tensor in tensors_of(output)):
            return output
        return func(*args, **kwargs)

    def _without_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in INDEXING:  # how many places a mask has is known, as long as it is real
            args = (args[0], places_of(args[1]), *args[2:])
        written = kwargs.get("out", args[0])  # several tensors, for an optimiser
        known = not any(isinstance(tensor, FakeTensor) for tensor in tensors_of(written))
        if func._schema.is_mutable and known:
            return written  # numbers that nobody knows would go into real ones
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def places_of(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices with real masks [...] replaced by the places [n] where they are true."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        if index is not None and is_mask and not isinstance(index, FakeTensor):
            places.extend(index.nonzero(as_tuple=True))
        else:
            places.append(index)
    return places
