"""Compiling what runs once a step: `torch.compile` with the settings that decoding needs.

On a CPU without kernels of ours for the weights these are frozen into the graph and packed for the
processor once; eagerly they are packed again at every call, which for one row costs more than the
multiplication. Calls go through C++, as a step is many short calls. On a GPU nothing is compiled
here: the function is recorded as CUDA graphs, one for each shape, which takes as long as a few
calls; see `recordings`.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from inspect import signature
from pathlib import Path
from threading import RLock
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.fx.experimental._config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.types import GuardFilterEntry
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from drafthead.backends.cpu.direct_call import OtherLayoutError, Recorder, direct_call
from drafthead.backends.cpu.graph_record import keep, log_useless, records
from drafthead.backends.cpu.recipes import Recipes
from drafthead.backends.cpu.substitutions import ATTENTION
from drafthead.backends.cuda.recordings import Recordings
from drafthead.backends.fingerprint import UndescribedError, described, digest, surroundings
from drafthead.core.backend import NOTHING, no_variant
from drafthead.core.dims import Dims, Place, Spec, by_letter, size_at, tensor_at
from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.disk_cache import reason_against, usable_cache_folder
from drafthead.core.substitution import Substituting

CPU_OPTIONS: dict[str, Any] = {
    "freezing": True,
    "cpp_wrapper": True,
    "cpp.enable_concat_linear": True,
    # Otherwise the values of small weights are written into the code, which serves other weights.
    "always_keep_tensor_constants": True,
    # A loop of fewer steps a thread is over before the other threads have begun.
    "cpp.min_chunk_size": 4096,
}
# A graph that torch makes again for other arguments is made without our settings and is many times
# slower. Older versions of torch have no option against it.
ONE_GRAPH: dict[str, Any] = (
    {"recompile_limit": 1} if "recompile_limit" in signature(torch.compile).parameters else {}
)
# Graphs of one kind; a need for more means that arguments differ in ways that no kind records. What
# more there is runs uncompiled.
MOST_GRAPHS = 8

logger = logging.getLogger(__name__)
Graph = Callable[..., Any]


class Compiled:
    """A function of tensors under `torch.compile`, with an account of what compiling took.

    Sizes that `dims` names by a letter may change from call to call without another graph, except
    that size 1 is a graph of its own, because the code for it differs. What the function reads
    beside its arguments, such as a model, is taken to stay as it was when the graph was made:
    checking each part of a model at every call would cost more than a drafting pass.
    """

    made: ClassVar[int] = 0  # graphs, by this process
    # Held while a graph is made: what torch and our kernels keep of it is shared by all threads.
    making: ClassVar[RLock] = RLock()

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        dtype: torch.dtype,
        dims: Mapping[str, Spec],
        variant: Callable[..., Hashable] = no_variant,
        around: AbstractContextManager[object] = NOTHING,
        reads: Sequence[Any] | None = None,
    ):
        """`dims` declares the shapes of the arguments, see `Dims`; they are checked when a graph is
        made. `variant(*arguments)` is for what else asks for another graph. `dtype` is that of the
        weights. A graph is made within `around`: with the hooks, say, whose work is to become part
        of it. `reads` are the models and other values that the function reads beside its arguments;
        a graph is kept on the disk where they are known.

        The function returns a tensor, None, a constant number, or a tuple of such values.
        """
        keep_compiled_code()
        self.function, self.variant, self.around = function, variant, around
        self.reads = reads
        self.dims = Dims(function, dims)
        self.device, self.dtype = device, dtype
        self.on_cpu = device.type == "cpu"
        self.options: dict[str, Any] = CPU_OPTIONS
        self.graphs: dict[Hashable, list[Graph]] = {}
        self.seconds, self.longest, self.times_forgotten = 0.0, 0.0, 0

    def __call__(self, *arguments: Any) -> Any:
        """The function's value; raises UserError for code that cannot be compiled.

        Several threads may call.
        """
        if not self.on_cpu:
            return self._recorded(arguments)
        graphs, tried = self.graphs.setdefault(self.kind(arguments), []), 0
        # A graph refuses arguments of a layout that it was not made for, before it computes.
        for graph in graphs:
            try:
                return graph(*arguments)
            except (OtherLayoutError, FailOnRecompileLimitHit):
                tried += 1  # made for arguments of another layout
        if tried >= MOST_GRAPHS:
            warn_of_many(self.function)
            return self._uncompiled(arguments)
        with Compiled.making:
            # Another thread may have made one while this one waited for the lock.
            if len(graphs) == tried:
                return self._made(graphs, arguments)
        return self(*arguments)  # another thread has just made a graph: it may be the one

    def _recorded(self, arguments: Sequence[Any]) -> Any:
        """The function's value by its recordings, which tell shapes apart by themselves."""
        graphs = self.graphs.get(None)
        if graphs is not None:
            return graphs[0](*arguments)
        started, own = time.perf_counter(), within(self.around, self.function)
        value = self.graphs.setdefault(None, [Recordings(own, self.dims.held)])[0](*arguments)
        self._count(started)
        return value

    def _uncompiled(self, arguments: Sequence[Any]) -> Any:
        """The function's value without a graph."""
        # The hooks that are part of a graph have to run here as well.
        with self.around:
            return self.function(*arguments)

    def _made(self, graphs: list[Graph], arguments: Sequence[Any]) -> Any:
        """The function's value from a new graph, which is added to those of its kind."""
        started = time.perf_counter()
        made = self.make(arguments)
        graphs.append(made.graph)
        self._count(started)
        return made.value

    def _count(self, started: float) -> None:
        """Note that a graph has been made, begun at a time."""
        taken = time.perf_counter() - started
        self.seconds, self.longest = self.seconds + taken, max(self.longest, taken)
        Compiled.made += 1

    def make(self, arguments: Sequence[Any]) -> "Made":
        """A graph for calls of the kind of `arguments`, from the disk or compiled."""
        key = self._key(arguments)
        return self._stored(key, arguments) or self._compiled(key, arguments)

    def _key(self, arguments: Sequence[Any]) -> str | None:
        """Under which a graph for these arguments is kept on the disk; None if it cannot be."""
        if self.reads is None:
            return None
        own = self.function, self.dims.specs, self.kind(arguments), self.reads, self.options
        try:
            return digest([surroundings(), described(list(own))])
        except UndescribedError as unknown:
            tell_of_each_process(str(unknown))
            return None

    def _stored(self, key: str | None, arguments: Sequence[Any]) -> "Made | None":
        """A graph that another process has made; None where there is none."""
        if key is None:
            return None
        for path, record in records(key):
            try:
                if record.is_met(arguments):
                    graph = direct_call(record, record.load(self.reads or ()), arguments)
                    return Made(graph, graph(*arguments))
            except Exception as error:  # whatever the code of a file raises that does not fit
                log_useless(path, error)
                # torch would take from its own cache what has just failed.
                self.options = self.options | {"force_disable_caches": True}
        return None

    def forget(self) -> None:
        """Make all graphs again when they are needed, for what the function reads has changed."""
        # Those on the disk stay: they hold no weights, only how to make constants of them.
        self.graphs.clear()
        self.times_forgotten += 1

    def kind(self, arguments: Sequence[Any]) -> Hashable:
        """Which of its graphs a call needs."""
        return self.dims.kind(arguments), self.variant(*arguments)

    def _compiled(self, key: str | None, arguments: Sequence[Any]) -> "Made":
        """A new graph, which is kept under `key`."""
        tell_of_compiling()
        self.dims.check(arguments)
        for place in self.dims.places(arguments):
            if size_at(arguments, place) != 1:
                torch._dynamo.mark_dynamic(tensor_at(arguments, place), place.dim)
        recorder = Recorder(self.options, Recipes(self.reads or ()))
        equal = by_letter(self.dims.places(arguments))
        traced = with_own_code(partial(self._call, equal))
        compiled = torch.compile(
            traced,
            fullgraph=True,
            backend=recorder,
            options={"guard_filter_fn": guards_of_arguments},
            **ONE_GRAPH,
        )
        try:
            # Tracing too must know that weights will be frozen: it then takes them for constants.
            # What differs between two models of a process is not thereby a size that changes.
            with (
                self.around,
                torch._inductor.config.patch(self.options),
                torch._dynamo.config.patch(automatic_dynamic_shapes=False),
                # Sizes that happen to be equal now, such as positions and nodes, need not stay so.
                torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
            ):
                result = compiled(*arguments)
        except (TorchDynamoException, InductorError) as error:
            cause = getattr(error, "inner_exception", error)  # of what a backend has raised
            reason = first_line(cause)
            raise UserError(
                f"this model or drafter cannot be compiled ({reason}): decode without compile"
            ) from error
        graph, record = recorder.finish(result, arguments)
        if key is not None and record is not None:
            keep(key, record)
        return Made(graph, result)

    def _call(self, equal: Sequence[Sequence[Place]], *arguments: Any) -> Any:
        """The traced function, after the tracer has been told which sizes are equal."""
        # Every distinct size is one more input of the graph and costs microseconds at each call.
        for first, *others in equal:
            for other in others:
                torch._check(size_at(arguments, other) == size_at(arguments, first))
        with Substituting(ATTENTION):
            return self.function(*arguments)


class Made(NamedTuple):
    """A graph that has just been made, and called."""

    graph: Graph
    value: Any  # of the call


def within(context: AbstractContextManager[object], function: Graph) -> Graph:
    """The function, called within a context each time."""

    def call(*arguments: Any) -> Any:
        with context:
            return function(*arguments)

    return call


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a code object of its own.

    torch keeps graphs by code object and would otherwise offer those of one model to another.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def guards_of_arguments(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which conditions torch checks at every call: those on arguments and on its own state, which
    has no name.
    """
    return [not guard.name or guard.name.startswith("arguments") for guard in guards]


@cache
def warn_of_many(function: Callable[..., Any]) -> None:
    """Warn, once for each function, that it also runs uncompiled."""
    logger.warning(
        "%s has %d graphs for arguments of other layouts: for this one it runs without compiling",
        getattr(function, "__qualname__", function),
        MOST_GRAPHS,
    )


@cache
def tell_of_compiling() -> None:
    """Say, once in a process, why nothing else happens."""
    logger.info("compiling, for a minute or more; later runs reuse the result")


@cache
def tell_of_each_process(unknown: str) -> None:
    """Say, once for each reason, why graphs are not kept on the disk."""
    logger.info(
        "each process compiles what reads %s: it has no description to keep graphs under", unknown
    )


def keep_compiled_code() -> None:
    """Let compiled code outlive the process and the machine's next start, unless the user has
    chosen a place for it, or nothing can be written there.

    Raises UserError where nothing can be written in the place that the user has chosen.
    """
    place = "TORCHINDUCTOR_CACHE_DIR"
    chosen = os.environ.get(place)
    # Importing torch's tracer writes a temporary folder into the environment: that is no choice.
    if chosen in (None, str(Path(default_cache_dir()).absolute())):
        folder = usable_cache_folder("compiled")
        if folder is not None:
            os.environ[place] = str(folder)
    elif reason := reason_against(Path(chosen)):
        raise UserError(
            f"{place} is {chosen}, where compiled code cannot be written ({reason}): set it to a "
            "folder of yours, or unset it"
        )
