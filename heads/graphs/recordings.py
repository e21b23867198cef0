"""Recorded calls: a function of tensors as one CUDA graph for each shape of its arguments.

Recording needs no compiler: it takes as long as a few calls. A recording repeats the same kernels at the same addresses. So the arguments of a call are copied
to fixed places, but for those that keep their address (a cache, which the function writes into),
and the values are copied out, because the next call overwrites them.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

# Recordings of one function; the one that has not been used for longest makes room for another.
# Each holds its kernels' arguments and its results; intermediate results share memory.
MOST_RECORDINGS = 256
# Calls before a recording is made: in the first libraries load their kernels, in the second none is
# left to load.
WARM_UPS = 2

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    """A call that cannot be recorded, and why."""


# Of a function and its arguments: how to repeat that call, and the value that each repetition
# writes again.
Capture = Callable[[Callable[..., Any], Sequence[Any]], tuple[Callable[[], None], Any]]


def cuda_graph(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[Callable[[], None], Any]:
    """Record one call; see `Capture`. Calls the function `WARM_UPS` times before."""
    device = device_of(arguments)
    assert device is not None
    current, (aside, pool) = torch.cuda.current_stream(device), capturing_on(device)
    graph = torch.cuda.CUDAGraph()
    aside.wait_stream(current)
    try:
        # The device need not be the current one. The stream is entered here as well, because
        # torch stays on that of a capture that fails.
        with torch.cuda.device(device), torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                function(*arguments)
            value = captured(graph, pool, aside, function, arguments)
    finally:
        current.wait_stream(aside)  # which may have written into what is held
    return graph.replay, value


def captured(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    stream: torch.cuda.Stream,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    """The value of the call that becomes the graph; raises CaptureError where it cannot."""
    try:
        # What other threads allocate meanwhile is no error of this one's capture.
        capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
        with no_collection(), capture:
            return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # which names the operation that is not permitted
        capturing_on.cache_clear()  # the memory of a capture that failed takes no other
        raise CaptureError(str(error).strip().splitlines()[0]) from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Within, Python collects no garbage: to free an older graph would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def capturing_on(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """The stream of all captures on a device, and the memory of what they compute on their way.

    Recordings share that memory, their results too, since they never run at the same time; see
    `Turn`. A stream for each would keep a workspace for each.
    """
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


class Turn:
    """Recorded calls follow each other, on the host and on the device: they share memory.

    A call is copies to the places, the repetition, and copies of its results. No other call may
    come in between, of another function neither: it may overwrite the results.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.latest: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, device: torch.device | None) -> Iterator[None]:
        """Wait for one's turn; on the device, for calls that other streams have begun."""
        with self.lock:
            if device is not None and device.type == "cuda":
                current = torch.cuda.current_stream(device)
                if (latest := self.latest.get(device, current)) != current:
                    current.wait_stream(latest)
                self.latest[device] = current
            yield


TURN = Turn()


def device_of(arguments: Sequence[Any]) -> torch.device | None:
    """The device of the tensors among arguments; None where there is no tensor."""
    found = (leaf.device for leaf in tree_leaves(arguments) if torch.is_tensor(leaf))
    return next(found, None)


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
        self.reason_against: str | None = None  # why it cannot be recorded, once that is known

    def __call__(self, *arguments: Any) -> Any:
        """The function's value, in tensors of its own.

        A function that cannot be recorded is called instead, which one line in the log says: it
        asks the device for a number, say, on which its next kernels depend.
        """
        if self.reason_against is not None:
            return self.function(*arguments)
        try:
            return self._recorded(arguments)
        except torch.OutOfMemoryError:
            raise
        except CaptureError as error:
            self.reason_against = str(error)
            name = getattr(self.function, "__qualname__", repr(self.function))
            logger.warning("%s runs unrecorded, and slower: %s", name, self.reason_against)
            return self.function(*arguments)

    def _recorded(self, arguments: Sequence[Any]) -> Any:
        """The value from a recording; raises CaptureError where none can be made."""
        held = [argument if n in self.held else None for n, argument in enumerate(arguments)]
        given = [None if n in self.held else argument for n, argument in enumerate(arguments)]
        leaves, structure = tree_flatten(given)
        key = self._key(held, leaves, structure)
        with TURN.on(device_of(leaves)):
            if key not in self.recordings:
                recording = Recording(self.function, held, leaves, structure, self.capture)
                self.recordings[key] = recording
                if len(self.recordings) > self.most:
                    self.recordings.popitem(last=False)
            self.recordings.move_to_end(key)
            return self.recordings[key].repeated(leaves)

    @staticmethod
    def _key(held: Sequence[Any], leaves: Sequence[Any], structure: TreeSpec) -> Hashable:
        """What a recording is made for: addresses of what is held, and the shapes of all.

        Memory that was freed may come back at the same address in another shape.
        """
        kept = [(t.data_ptr(), *form(t)) for t in tree_leaves(held) if torch.is_tensor(t)]
        return tuple(kept), tuple(map(form, leaves)), structure


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


def form(leaf: Any) -> tuple[Any, ...]:
    """Shape and layout of a tensor, or a constant with its type: 1 is not True here."""
    if torch.is_tensor(leaf):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf


def fixed_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for a tensor [...] of the same layout, gaps and repetitions included."""
    kept = stored(tensor)
    with torch.inference_mode(False):  # a later call may be outside of that mode
        place = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device)
    return place.expand(tensor.shape)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [...] without repetitions: dimensions of stride 0 have size 1.

    The tables of a tree are one row that all rows of a batch share, of shape [B, N] and strides
    (0, 1): what is stored has shape [1, N].
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
