"""Hooks on a model that several threads use, and the taps that read its hidden states with them.

A pass belongs to the thread that makes it. But a hook sits on a module that all threads share, so
it fires in the passes of every thread. Two things keep passes apart. Passes with hooks hold the
model's lock, which all targets over the model share. And a hook ignores other threads, because
whoever owns the model may run it without the lock. Such hooks alone would not be enough: torch
traces all hooks that it finds into a graph, those of other threads' passes among them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.features import Features, FeatureSpec

# Not attributes of the models, which could then be neither copied nor pickled.
_locks: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()
_looking_up = Lock()
# Attributes of modules that passes set and take back, see `evaluating` and `StatefulLayers`.
OF_PASSES = {"forward", "training"}


def hook_lock(model: nn.Module) -> Lock:
    """The lock to hold while hooks are attached to a model: for a pass, not for a generation."""
    with _looking_up:
        return _locks.setdefault(model, Lock())


def share_lock(model: nn.Module, other: nn.Module) -> None:
    """Let passes over a model take the lock of `other`, of whose modules it is made."""
    lock = hook_lock(other)
    with _looking_up:
        _locks[model] = lock


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for passes of the calling thread; in other threads it does nothing."""
    owner = get_ident()

    def call(*arguments: Any) -> Any:
        return hook(*arguments) if get_ident() == owner else None

    call.is_of_a_pass = True  # type: ignore[attr-defined]  # `weight_state` asks
    return call


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, all modules compute as in decoding; what was in training mode is so again after it.

    The caller holds the model's `hook_lock` where other threads may make passes.
    """
    training: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:  # a fifth of the time that `modules` takes, since each pass asks
        part = waiting.pop()
        if part.training:
            training.append(part)
        waiting += filter(None, part._modules.values())
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Within, passes may leave states in modules; after it these hold what they held before.

    Other threads may make passes meanwhile: they find all that they need at any time, and what
    comes and goes with passes is left to these.
    """
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in model.modules()]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            for held, own in ((vars(part), attributes), (part._buffers, buffers)):
                for name in held.keys() - own.keys() - OF_PASSES:
                    del held[name]
                held.update({name: own[name] for name in own.keys() - OF_PASSES})


class Place(NamedTuple):
    """The place of a hidden state: the output of a module, or its input."""

    module: nn.Module
    is_input: bool = False


class Tapped(Protocol):
    """The parts of a target that `Taps` reads."""

    model: PreTrainedModel

    @property
    def num_layers(self) -> int:
        """Number L of decoder layers."""

    def place_of(self, number: int) -> Place:
        """The place of the hidden state of a number in `FeatureSpec`."""


class Taps:
    """Forward hooks that store the outputs of chosen layers during one pass of this thread.

    Other passes over the model that need hooks wait meanwhile, those of other targets too. The
    model is in evaluation mode within, whatever its mode.
    """

    def __init__(self, target: Tapped, spec: FeatureSpec):
        """Raises UserError when a layer of `spec` lies outside the model."""
        outside = [i for i in spec.layers if not -1 <= i <= target.num_layers]
        if outside:
            raise UserError(
                f"the target has layers 0 to {target.num_layers - 1}, but the head taps {outside}"
            )
        self.spec = spec
        numbers = [*spec.layers, target.num_layers] if spec.last else [*spec.layers]
        self.places = [target.place_of(number) for number in numbers]
        self.kept: list[torch.Tensor | None] = [None] * len(self.places)
        self.model, self.lock = target.model, hook_lock(target.model)
        self.mode = evaluating(self.model)
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> "Taps":
        """Take the model's lock and attach the hooks."""
        self.lock.acquire()
        self.mode = evaluating(self.model)
        self.mode.__enter__()
        try:
            for index in range(len(self.places)):
                self.handles.append(self._attach(index))
        except BaseException:  # an interrupt, say, must not leave the model locked
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks, whatever happened during the pass, and give back the lock."""
        while self.handles:
            self.handles.pop().remove()
        self.mode.__exit__(None, None, None)
        self.lock.release()

    def _attach(self, index: int) -> RemovableHandle:
        module, is_input = self.places[index]
        if is_input:
            keeper = in_this_thread(self._entry_keeper(index))
            return module.register_forward_pre_hook(keeper, with_kwargs=True)
        return module.register_forward_hook(in_this_thread(self._keeper(index)))

    def _keeper(self, index: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self.kept[index] = hidden  # type: ignore[assignment]

        return keep

    def _entry_keeper(self, index: int) -> Callable[..., None]:
        def keep(
            _module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
        ) -> None:
            self.kept[index] = args[0] if args else kwargs["hidden_states"]

        return keep

    def features(self) -> Features:
        """The stored states; raises UserError if a tapped module did not run, or gave no state."""
        kept = [hidden for hidden in self.kept if hidden is not None]
        if len(kept) != len(self.kept):
            raise UserError(
                "a tapped layer did not run: drafthead cannot read the hidden states of this model"
            )
        if any(hidden.dim() != 3 for hidden in kept):  # Gemma 3n
            raise UserError("a tapped layer carries several streams of states: no head reads them")
        return Features(kept[-1], tuple(kept[:-1])) if self.spec.last else Features(None, (*kept,))
