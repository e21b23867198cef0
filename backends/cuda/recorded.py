"""Recorded calls: a function of tensors as one CUDA graph for each shape of its arguments.

Recording needs no compiler: it takes as long as a few calls. A recording repeats the same kernels
at the same addresses. So the arguments of a call are copied to fixed places, but for those that
keep their address (a cache, which the function writes into), and the values are copied out, because
the next call overwrites them.
"""

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from threading import Lock, RLock
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from drafthead.core.errors import first_line
from drafthead.core.kv_cache.column_cache import CacheView

# Recordings of one function; the one that has not been used for longest makes room for another.
# Each holds its kernels' arguments and its results; intermediate results share memory.
MOST_RECORDINGS = 256
# Share of a device's memory that stays free: where it is less, the recordings that were not used
# for longest go before another is made, but for so many that a few kinds of requests need.
LEAST_FREE, FEWEST_RECORDINGS = 0.05, 32
# Bytes of memory that a recording keeps at most for an argument, only to see whether it comes
# again: parts of a long prompt keep all of it.
MOST_KEPT = 2**20
# Calls on the stream of captures before one, after a call in which code is compiled and libraries
# load their kernels: then none is left to load.
WARM_UPS = 1
# A capture that fails is tried again at the 8th call that needs one, then at the 64th, and so on:
# what spoils it may pass, and each try takes time.
PATIENCE = 8

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
    current, capturing = torch.cuda.current_stream(device), capturing_on(device)
    graph, aside = torch.cuda.CUDAGraph(), capturing.stream
    aside.wait_stream(current)
    try:
        # The device need not be the current one. The stream is entered here as well, because
        # torch stays on that of a capture that fails.
        with torch.cuda.device(device), torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                function(*arguments)
            value = captured(graph, capturing, function, arguments)
    finally:
        current.wait_stream(aside)  # which may have written into what is held
    return graph.replay, value


class Capturing(NamedTuple):
    """The stream on which a device's calls are captured, and the memory of what they compute.

    Recordings share that memory, their results too, since they never run at the same time; see
    `CaptureTurn`. A stream for each would keep a workspace for each.
    """

    stream: torch.cuda.Stream
    pool: Any
    keeper: torch.cuda.CUDAGraph  # uses the memory, so that it outlives the recordings in it


def captured(
    graph: torch.cuda.CUDAGraph,
    capturing: Capturing,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    """The value of the call that becomes the graph; raises CaptureError where it cannot."""
    # What other threads allocate meanwhile is no error of this one's capture.
    capture = torch.cuda.graph(
        graph, capturing.pool, capturing.stream, capture_error_mode="thread_local"
    )
    try:
        with no_collection(), capture, own_workspace():
            return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # which names the operation that is not permitted
        capturing_on.cache_clear()  # the memory of a capture that failed takes no other
        raise CaptureError(first_line(error)) from error


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


@contextmanager
def own_workspace() -> Iterator[None]:
    """Within a capture, cuBLAS works in memory of the capture's pool, which outlives all graphs.

    torch keeps a workspace for each stream, and drops that of a stream with each graph that was
    captured there (pytorch #193402), and all of them for other recordings than ours: graphs that
    are left would go on to write there.
    """
    clear: Callable[[], None] = torch._C._cuda_clearCublasWorkspaces
    clear()  # as it was made outside of the capture, the first product will ask for another
    try:
        yield
    finally:
        clear()  # from now on it is free memory of the pool


@cache
def capturing_on(device: torch.device) -> Capturing:
    """The place where all calls on a device are captured."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    # When the last graph of a pool goes, torch closes the pool, and as long as a result of such a
    # graph is held it refuses to open it again: the next recording would fail.
    keeper = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), no_collection():
        capture = torch.cuda.graph(keeper, pool, stream, capture_error_mode="thread_local")
        with capture:
            torch.zeros(1, device=device)
    return Capturing(stream, pool, keeper)


class CaptureTurn:
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


TURN = CaptureTurn()
# Held while a recording is made: what compilers and captures change is shared by all threads. Calls
# that have a recording do not wait for it, so a compiler keeps nobody from the device.
MAKING = RLock()


def device_of(arguments: Sequence[Any]) -> torch.device | None:
    """The device of the tensors among arguments; None where there is no tensor."""
    found: list[torch.Tensor] = []
    flatten(list(arguments), found, [])
    return found[0].device if found else None


class Recorded:
    """A function that is recorded once for each shape of its arguments, then repeated.

    The function may be called several times for one result, so a call must leave behind what a
    second call with the same arguments would leave behind. Several threads may call.
    """

    made: ClassVar[int] = 0  # functions that this process has recorded

    def __init__(
        self,
        function: Callable[..., Any],
        held: Collection[int] = (),
        capture: Capture | None = None,
        most: int = MOST_RECORDINGS,
    ):
        """`held` are the places of arguments, tensors or lists of them, that keep their address.

        `capture` is `cuda_graph` unless given.
        """
        self.function, self.held, self.most = function, held, most
        self.capture = capture or cuda_graph
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        ALL_RECORDED.add(self)
        self.longest = 0.0  # seconds that a recording took, with what was compiled for it
        self.forget()

    def forget(self) -> None:
        """Record again, for the weights that the function reads have changed."""
        self.recordings.clear()
        self.failures = 0  # of captures
        self.calls_to_wait = 0  # before the next capture is tried

    def __call__(self, *arguments: Any) -> Any:
        """The function's value, in tensors of its own.

        A function that cannot be recorded is called instead, which one line in the log says: it
        asks the device for a number, say, on which its next kernels depend.
        """
        leaves: list[torch.Tensor] = []
        key: list[Hashable] = []
        for number, argument in enumerate(arguments):
            if number in self.held:
                key.append(place_of(argument))
            else:
                flatten(argument, leaves, key)
        wanted = tuple(key)
        recording = self.recordings.get(wanted)
        if recording is None:
            with MAKING:  # where another thread may have made it meanwhile
                recording = self.recordings.get(wanted) or self._made(wanted, arguments, leaves)
        if recording is None:
            return self.function(*arguments)
        with TURN.on(recording.device):
            if wanted in self.recordings:  # or another thread has just needed its memory
                self.recordings.move_to_end(wanted)
            recording.used = next(CALLS)
            return recording.repeated(leaves)

    def _made(
        self, wanted: Hashable, arguments: Sequence[Any], leaves: Sequence[torch.Tensor]
    ) -> "Recording | None":
        """A new recording of a call; None where none can be made, or was of late."""
        if self.calls_to_wait:
            self.calls_to_wait -= 1
            return None
        started = time.perf_counter()
        recording = Recording(self.function, arguments, self.held, leaves)
        with TURN.on(recording.device):
            captured = self._captured(wanted, recording)
        if self.longest == 0:
            Recorded.made += 1
        self.longest = max(self.longest, time.perf_counter() - started)
        return captured

    def _captured(self, wanted: Hashable, recording: "Recording") -> "Recording | None":
        """The recording, captured and kept; None where it cannot be captured."""
        if recording.device is not None:
            make_room(recording.device)
        recording.used = next(CALLS)  # or it would be the first to make room
        try:
            recording.capture(self.capture)
        except CaptureError as error:
            self.calls_to_wait = (PATIENCE - 1) * PATIENCE**self.failures - 1
            self.failures += 1
            if self.failures == 1:
                name = getattr(self.function, "__qualname__", repr(self.function))
                logger.warning("%s runs without a CUDA graph, which is slower: %s", name, error)
            return None
        self.recordings[wanted] = recording
        if len(self.recordings) > self.most:
            self.recordings.popitem(last=False)
        return recording


CALLS = count()  # numbers that grow from call to call
ALL_RECORDED: WeakSet[Recorded] = WeakSet()


def make_room(device: torch.device) -> None:
    """Let recordings on a device go that were not used for longest, where its memory is short."""
    if free_share(device) >= LEAST_FREE:
        return
    known = [
        (each.used, key, calls.recordings)
        for calls in ALL_RECORDED
        for key, each in calls.recordings.items()
        if each.device == device
    ]
    oldest = sorted(known, key=lambda each: each[0])[:-FEWEST_RECORDINGS]
    # As much as half of them at a time: when memory can be used again is only seen afterwards.
    for _, key, recordings in oldest[: -(-len(known) // 2)]:
        del recordings[key]


def free_share(device: torch.device) -> float:
    """The share of a device's memory that is free, or that torch has kept for tensors to come."""
    if device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + kept) / total


# torch's own trees know more kinds of values, and take a quarter of a millisecond a step.
def flatten(value: Any, leaves: list[torch.Tensor], key: list[Hashable]) -> None:
    """Add the tensors [...] of an argument to `leaves`, and what a recording is made for to `key`.

    That is shape and layout of a tensor, and a constant with its type: 1 is not True here. The
    memory of a cache keeps its address.
    """
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        key.append((value.shape, value.stride(), value.dtype, value.device))
    elif isinstance(value, CacheView):
        key += (place_of(value.keys), place_of(value.values))
        flatten(value[2:], leaves, key)
    elif isinstance(value, tuple | list):
        key.append((type(value), len(value)))
        for part in value:
            flatten(part, leaves, key)
    elif isinstance(value, dict):
        key.append((dict, *value))
        for part in value.values():
            flatten(part, leaves, key)
    else:
        key.append((type(value), value))


def rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with `change` of its tensors [...], in their order; see `flatten`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, CacheView):
        return CacheView(value.keys, value.values, *rebuilt(value[2:], change))
    if isinstance(value, tuple | list):
        parts = (rebuilt(part, change) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: rebuilt(part, change) for name, part in value.items()}
    return value


def place_of(held: torch.Tensor | Sequence[torch.Tensor]) -> Hashable:
    """The addresses that stay: of a cache's tensors [...], which are all made for one shape.

    Memory that was freed may come back at the same address in another shape.
    """
    tensors = [held] if isinstance(held, torch.Tensor) else held
    first = tensors[0]
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    return first.shape, first.stride(), first.dtype, first.device, addresses


class Recording:
    """One recorded call and its fixed places."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        held: Collection[int],
        leaves: Sequence[torch.Tensor],
    ):
        """Makes the call once, in which what it runs is compiled.

        `leaves` are the tensors of those arguments that are not `held`.
        """
        self.used, self.device = 0, leaves[0].device if leaves else None
        places = [fixed_like(leaf) for leaf in leaves]
        self.places = [stored(place) for place in places]
        # What lies in each place: a table that comes again as it was is not copied again.
        self.filled: list[tuple[torch.Tensor, int] | None] = [None] * len(leaves)
        self._fill(leaves)
        rest = iter(places)
        self.given = [
            argument if number in held else rebuilt(argument, lambda _: next(rest))
            for number, argument in enumerate(arguments)
        ]
        self.function = function
        function(*self.given)  # at its places, whose kind compiled code depends on

    def capture(self, capture: Capture) -> None:
        """Record the call, in one's turn."""
        self.replay, self.value = capture(self.function, self.given)
        del self.function, self.given  # a graph holds addresses

    def repeated(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The value of the call with other numbers in the arguments [...] that are not held."""
        self._fill(leaves)
        self.replay()
        return copied(self.value)

    def _fill(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy the arguments to their places, those that are not there already."""
        places, new = [], []
        for number, leaf in enumerate(leaves):
            known = self.filled[number]
            if known is not None and is_unchanged(*known, leaf):
                continue
            places.append(self.places[number])
            new.append(stored(leaf))
            # Held, so that no other tensor can come to lie there.
            self.filled[number] = (leaf, leaf._version) if is_known_again(leaf) else None
        copy_all(places, new)


def copied(value: Any) -> Any:
    """The value with its tensors copied."""
    tensors: list[torch.Tensor] = []
    flatten(value, tensors, [])
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(copies, tensors)
    rest = iter(copies)
    return rebuilt(value, lambda _: next(rest))


def copy_all(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors [...] to places of the same layout, those of a number type in one launch."""
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        of_type = by_type.setdefault(tensor.dtype, ([], []))
        of_type[0].append(place)
        of_type[1].append(tensor)
    for to, given in by_type.values():
        torch._foreach_copy_(to, given, non_blocking=True)


def is_known_again(leaf: torch.Tensor) -> bool:
    """Whether a tensor [...] counts its changes, and may be kept until it comes again."""
    return not leaf.is_inference() and leaf.untyped_storage().nbytes() <= MOST_KEPT


def is_unchanged(known: torch.Tensor, version: int, leaf: torch.Tensor) -> bool:
    """Whether a tensor [...] of the same layout is what was `known`, in memory and in numbers."""
    if leaf is known:
        return leaf._version == version
    return (
        leaf.data_ptr() == known.data_ptr()
        and not leaf.is_inference()
        and leaf._version == version == known._version
    )


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
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
