"""The arguments that a model gives each layer in a pass, to run one layer with just them.

A layer is called as `layer(hidden, *args, **kwargs)`, with tensors, constants and the cache among
the arguments. Here it is a function of tensors: its input, its part of the cache, and the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

from drafthead.core.target.tree_cache import StepCache

PLAIN = None.__class__, bool, float, str  # no whole numbers, which may be sizes that change
Form = Any  # of arguments, in JSON


class UnlikeError(Exception):
    """Layers that cannot be compiled as one."""


class OneLayer(StepCache):
    """A layer's part of a cache, whatever number the layer has."""

    def update(
        self,
        key_states: torch.Tensor,  # [B, H, T, D]
        value_states: torch.Tensor,  # [B, H, T, D]
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values as `StepCache.update` does."""
        return self.append(0, key_states, value_states)


class LayerTensors(NamedTuple):
    """The tensors of a layer's call."""

    hidden: torch.Tensor  # [B, T, D]
    keys: torch.Tensor  # [B, H, capacity, D]
    values: torch.Tensor
    columns: torch.Tensor  # [T] that the pass writes
    others: tuple[torch.Tensor, ...]  # masks, positions and what follows from them

    @property
    def flat(self) -> list[torch.Tensor]:
        """All tensors [...] in one list."""
        return [self.hidden, self.keys, self.values, self.columns, *self.others]


def tensors_of(number: int, arguments: Any) -> LayerTensors:
    """The tensors in the arguments (args, kwargs) of layer `number`.

    Raises UnlikeError where there is no cache, or no hidden state [B, T, D] in the first place.
    """
    tensors, caches = [], []
    for leaf in leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, StepCache):
            caches.append(leaf)
    if not caches or not tensors or tensors[0].dim() != 3:
        raise UnlikeError("a layer is called in another way than is known")
    cache = caches[0]
    hidden, *others = tensors
    return LayerTensors(
        hidden, cache.keys[number], cache.values[number], cache.columns, tuple(others)
    )


def leaves(value: Any) -> list[Any]:
    """The parts of arguments, in order."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [value]


def form_of(value: Any) -> Form:
    """Arguments without their tensors; raises UnlikeError for what cannot be written down."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, StepCache):
        return "cache"
    if isinstance(value, PLAIN):
        return {"is": value}
    if type(value) in (list, tuple):
        return [type(value).__name__, *(form_of(part) for part in value)]
    if type(value) is dict:
        return ["dict", *([name, form_of(part)] for name, part in value.items())]
    raise UnlikeError(f"a layer is given a {type(value).__name__}")


def filled(form: Form, tensors: Iterator[torch.Tensor], cache: StepCache) -> Any:
    """The inverse of `form_of`, for tensors [...]."""
    if form == "tensor":
        return next(tensors)
    if form == "cache":
        return cache
    if isinstance(form, dict):
        return form["is"]
    kind, *parts = form
    if kind == "dict":
        return {name: filled(part, tensors, cache) for name, part in parts}
    values = [filled(part, tensors, cache) for part in parts]
    return tuple(values) if kind == "tuple" else values


@contextmanager
def replaced(
    layers: Sequence[nn.Module], make: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within, layer i is computed by `make(i, forward)`, in passes of this thread."""
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            own, given = layer.forward, vars(layer).get("forward")
            if given is None:
                stack.callback(delattr, layer, "forward")
            else:
                stack.callback(setattr, layer, "forward", given)
            layer.forward = in_place_of(own, make(number, own))
        yield


def in_place_of(own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """`other` in the calling thread, and `own` in all others."""
    owner = get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        # The tracer does not know `get_ident`, and traces the calling thread only.
        if torch.compiler.is_dynamo_compiling() or get_ident() == owner:
            return other(*args, **kwargs)
        return own(*args, **kwargs)

    return call
