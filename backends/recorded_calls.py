"""What a model gives each of its layers in a pass, and how to run one layer with just that.

A layer is called as `layer(hidden, *args, **kwargs)`, with tensors, constants and the cache among
the arguments. Here it is a function of tensors: its input, its part of the cache, and the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from drafthead.core.target.tree_cache import StepCache

PLAIN = None.__class__, bool, float, str  # no whole numbers, which may be sizes that change
Form = Any  # of arguments, in JSON


class UnlikeError(Exception):
    """Layers that cannot be compiled as one."""


class LastLayerError(Exception):
    """The last layer has run: no error, but it ends the pass."""


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
        """As `StepCache.update`."""
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
        """All of them in one list."""
        return [self.hidden, self.keys, self.values, self.columns, *self.others]


class LayerCall(NamedTuple):
    """One layer's call in a pass."""

    form: Form  # of its arguments
    tensors: LayerTensors
    output: torch.Tensor  # [B, T, D]
    in_tuple: bool  # whether the layer returns (output,)


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
    """What arguments consist of, in order."""
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
    """The inverse of `form_of`."""
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


class LayerFunction:
    """A layer as a function of tensors."""

    def __init__(self, layer: nn.Module, form: Form, mask: int):
        """`mask` is the place among the other tensors of one whose last size is that of the pass's
        columns.
        """
        self.layer, self.form, self.mask = layer, form, mask

    def run(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        keys: torch.Tensor,  # [B, H, capacity, D]
        values: torch.Tensor,
        columns: torch.Tensor,  # [T]
        others: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The layer's output [B, T, D]; its keys and values are written to the cache."""
        cache = OneLayer([keys], [values], columns, others[self.mask].shape[-1])
        args, kwargs = filled(self.form, iter((hidden, *others)), cache)
        output = self.layer(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


def copied(tensors: LayerTensors) -> LayerTensors:
    """The tensors as they are now, in the layout that compiled passes give them.

    Raises UnlikeError for a cache of another layout, whose copy would be written to.
    """
    if not (tensors.keys.is_contiguous() and tensors.values.is_contiguous()):
        raise UnlikeError("keys and values are not contiguous")
    hidden, columns, *others = (
        tensor.clone(memory_format=torch.contiguous_format)
        for tensor in (tensors.hidden, tensors.columns, *tensors.others)
    )
    return tensors._replace(hidden=hidden, columns=columns, others=tuple(others))


@contextmanager
def replaced(
    layers: Sequence[nn.Module], make: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within, layer i is computed by `make(i, forward)`, in passes of this thread."""
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            own = layer.forward
            mine = in_place_of(own, make(number, own))
            stack.enter_context(patch.object(layer, "forward", mine))
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


def recorded(layers: Sequence[nn.Module], run: Callable[[], Any]) -> list[LayerCall]:
    """The calls of all layers in a pass, which ends with the last of them.

    Raises UnlikeError where layers run in another order, several times or not at all.
    """
    calls: list[LayerCall] = []

    def make(number: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward function that notes its calls."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            """What the layer's `own` forward function returns."""
            if number != len(calls):
                raise UnlikeError("layers do not run one after the other")
            given = (args, kwargs)
            tensors = copied(tensors_of(number, given))
            output = own(*args, **kwargs)
            in_tuple = isinstance(output, tuple)
            hidden = output[0] if in_tuple else output
            if (in_tuple and len(output) > 1) or hidden.shape != tensors.hidden.shape:
                raise UnlikeError("a layer returns more than its hidden state")
            calls.append(LayerCall(form_of(given), tensors, hidden.clone(), in_tuple))
            if len(calls) == len(layers):
                raise LastLayerError
            return output

        return noted

    with replaced(layers, make):
        try:
            run()
        except LastLayerError:
            return calls
    raise UnlikeError("layers do not run one after the other")
