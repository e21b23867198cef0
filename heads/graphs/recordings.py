"""Recorded calls: a function of tensors as one CUDA graph for each shape of its arguments.

A recording repeats the same kernels at the same addresses. So the arguments of a call are copied
to fixed places, but for those that keep their address (a cache, which the function writes into),
and the values are copied out, because the next call overwrites them.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

# Recordings of one function; the one that has not been used for longest makes room for another.
# Each holds as much memory as the function's intermediate results, shared among all of them.
MOST_RECORDINGS = 64
# Calls before a recording is made, in which libraries choose and load their kernels.
WARM_UPS = 3

# Of a function and its arguments: how to repeat that call, and the value that each repetition
# writes again.
Capture = Callable[[Callable[..., Any], Sequence[Any]], tuple[Callable[[], None], Any]]


def cuda_graph(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[Callable[[], None], Any]:
    """Record one call; see `Capture`. Calls the function `WARM_UPS` times before."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            function(*arguments)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=shared_pool()):
        value = function(*arguments)
    return graph.replay, value


@cache
def shared_pool() -> Any:
    """The memory of all recordings' intermediate results, which never run at the same time."""
    return torch.cuda.graph_pool_handle()


class Recordings:
    """A function that is recorded once for each shape of its arguments, then repeated.

    The function may be called several times for one result, so a call must leave behind what a
    second call with the same arguments would leave behind.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        held: Collection[int],
        capture: Capture = cuda_graph,
        most: int = MOST_RECORDINGS,
    ):
        """`held` are the places of arguments, tensors or lists of them, that keep their address."""
        self.function, self.held, self.capture, self.most = function, held, capture, most
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self.lock = Lock()  # between the copies in and out, no other thread may call

    def __call__(self, *arguments: Any) -> Any:
        """The function's value, in tensors of its own."""
        held = [argument if n in self.held else None for n, argument in enumerate(arguments)]
        given = [None if n in self.held else argument for n, argument in enumerate(arguments)]
        leaves, structure = tree_flatten(given)
        key = self._key(held, leaves, structure)
        with self.lock:
            if key not in self.recordings:
                recording = Recording(self.function, held, leaves, structure, self.capture)
                self.recordings[key] = recording
                if len(self.recordings) > self.most:
                    self.recordings.popitem(last=False)
            self.recordings.move_to_end(key)
            return self.recordings[key].repeated(leaves)

    @staticmethod
    def _key(held: Sequence[Any], leaves: Sequence[Any], structure: TreeSpec) -> Hashable:
        """What a recording is made for: addresses of what is held, shapes of all else."""
        addresses = [t.data_ptr() for t in tree_flatten(held)[0] if torch.is_tensor(t)]
        shapes = [
            (leaf.shape, leaf.stride(), leaf.dtype) if torch.is_tensor(leaf) else leaf
            for leaf in leaves
        ]
        return tuple(addresses), tuple(shapes), structure


class Recording:
    """One recorded call and its fixed places."""

    def __init__(
        self,
        function: Callable[..., Any],
        held: Sequence[Any],
        leaves: Sequence[Any],
        structure: TreeSpec,
        capture: Capture,
    ):
        """Record the call of the arguments in `held`, and in `leaves` where that has None."""
        self.places = [fixed_like(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        self._fill(leaves)
        given = tree_unflatten(self.places, structure)
        arguments = [kept if one is None else one for kept, one in zip(held, given, strict=True)]
        self.replay, self.value = capture(function, arguments)

    def repeated(self, leaves: Sequence[Any]) -> Any:
        """The value of the call with other numbers in the arguments that are not held."""
        self._fill(leaves)
        self.replay()
        return tree_map(lambda part: part.clone() if torch.is_tensor(part) else part, self.value)

    def _fill(self, leaves: Sequence[Any]) -> None:
        """Copy the arguments to their places."""
        for place, leaf in zip(self.places, leaves, strict=True):
            if torch.is_tensor(leaf):
                stored(place).copy_(stored(leaf), non_blocking=True)


def fixed_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for a tensor [...] of the same layout, repeated rows included."""
    return torch.empty_like(stored(tensor)).expand(tensor.shape)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [...] without repetitions: dimensions of stride 0 have size 1.

    The tables of a tree are one row that all rows of a batch share, of shape [B, N] and strides
    (0, 1): what is stored has shape [1, N].
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
