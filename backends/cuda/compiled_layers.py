"""Decoder layers compiled one by one, for recorded passes on a GPU.

A recording of eager layers repeats some 45 kernels a layer, one of compiled layers about half of
them. Compiling a whole model takes a minute and again for each kind of pass; a layer takes seconds,
and its code serves all layers that differ in their weights alone.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from drafthead.backends.cuda.compiled import UNCOMPILED, small_graphs, with_own_code
from drafthead.backends.cuda.fingerprint import (
    UndescribedError,
    described,
    digest,
    without_numbers,
)
from drafthead.backends.cuda.layer_arguments import (
    Form,
    OneLayer,
    UnlikeError,
    filled,
    form_of,
    replaced,
    tensors_of,
)
from drafthead.backends.cuda.merged_products import MergedProducts
from drafthead.backends.cuda.tree_kernels import KernelCache
from drafthead.core.errors import first_line
from drafthead.core.target.tree_cache import StepCache

# At one row inductor then makes matrix products its own, with norms and residuals fused into them.
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True}
# Why a layer stays uncompiled: what it is, torch's ways, or our reading of these.
OBSTACLES = UnlikeError, UndescribedError, *UNCOMPILED

logger = logging.getLogger(__name__)


class CompiledLayers:
    """The decoder layers of a model, of which one of each kind is compiled."""

    def __init__(self, layers: Sequence[nn.Module], options: dict[str, Any] | None = None):
        """`options` are those of torch's code generator, by default `OPTIONS`."""
        self.layers = layers
        self.codes: list[LayerCode] = []  # of each layer
        self.reason_against: Exception | None = None
        chosen, known = OPTIONS if options is None else options, {}
        try:  # now, before any pass has attached its hooks
            for layer in layers:
                kind = digest(without_numbers(described(layer)))
                if kind not in known:
                    known[kind] = LayerCode(layer, chosen)
                self.codes.append(known[kind])
                known[kind].products.weights_of(layer)  # which moves them before any pass
        except (UndescribedError, RuntimeError, NotImplementedError, TypeError) as error:
            self._give_up(error)  # unknown parts, or weights without a form of their own

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, passes of this thread run the compiled layers, or as they are where they cannot
        be compiled.
        """
        with replaced(self.layers, self._in_place_of):
            yield

    def _give_up(self, reason: Exception) -> None:
        """Leave the layers uncompiled from now on."""
        self.reason_against = reason
        line = first_line(reason)
        logger.warning("layers are not compiled: %s", line)

    def _in_place_of(self, number: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """The output of layer `number`, instead of its `own` forward function's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """The layer's value."""
            if self.reason_against is None:
                try:
                    return self.codes[number](number, self.layers[number], args, kwargs)
                except OBSTACLES as error:
                    self._give_up(error)
            return own(*args, **kwargs)

        return call


class LayerCode:
    """A layer compiled as a function of its weights and of what it is given."""

    def __init__(self, layer: nn.Module, options: dict[str, Any]):
        """The layer gives its form alone; weights come with each call."""
        self.form_alone = without_weights(layer)
        self.products = MergedProducts(self.form_alone)
        self.by_form: dict[str, Callable[..., Any]] = {}
        self.options = options

    def __call__(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """The value of a layer of this kind, `number` in its model.

        Raises UnlikeError for arguments of another form than is known, and what torch raises for
        code that it cannot compile.
        """
        tensors, form = tensors_of(number, (args, kwargs)), form_of((args, kwargs))
        cache = cache_in((args, kwargs))
        key = repr((form, cache.pending))
        if key not in self.by_form:
            self.by_form[key] = self._compiled(form, cache.pending)
        weights = self.products.weights_of(layer)
        # As many elements as a pass sees columns: a size may change, a number would be a constant.
        end = torch.empty(cache.end, device="meta")
        with small_graphs():
            return self.by_form[key](weights, end, *tensors.flat)

    def _compiled(self, form: Form, pending: int | None) -> Callable[..., Any]:
        """The layer under `torch.compile`, called with arguments of one form.

        With a number of `pending` nodes it attends by the tree kernel.
        """

        def run(
            weights: dict[str, torch.Tensor],
            end: torch.Tensor,  # [S] whose size is the number of columns that are seen
            hidden: torch.Tensor,  # [B, T, D]
            keys: torch.Tensor,  # [B, H, capacity, D]
            values: torch.Tensor,  # [B, H, capacity, D]
            columns: torch.Tensor,  # [T] that the pass writes
            *others: torch.Tensor,
        ) -> Any:
            """The layer's output; its keys and values are written to the cache."""
            cache: StepCache = OneLayer([keys], [values], columns, end.shape[0])
            if pending is not None:
                cache = OneKernelLayer([keys], [values], pending)
            args, kwargs = filled(form, iter((hidden, *others)), cache)
            output = functional_call(self.form_alone, weights, args, kwargs)
            self.products.forget()
            return output

        own = with_own_code(run)  # torch counts variants by code
        return torch.compile(own, fullgraph=True, dynamic=True, options=self.options)


def cache_in(arguments: Any) -> StepCache:
    """The cache among the arguments (args, kwargs) of a layer; raises UnlikeError for none."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        if isinstance(value, StepCache):
            return value
    raise UnlikeError("a layer is given no cache")


class OneKernelLayer(OneLayer, KernelCache):
    """A layer's part of a cache for the tree kernel, whatever number the layer has."""


def without_weights(layer: nn.Module) -> nn.Module:
    """A copy of the layer whose weights are of the same form and have no numbers.

    It shares the configuration, which also says by which function it attends.
    """
    configs = [module.config for module in layer.modules() if hasattr(module, "config")]
    known: dict[int, Any] = {id(config): config for config in configs}
    for weight in (*layer.parameters(), *layer.buffers()):
        empty = torch.empty_like(weight, device="meta")
        is_parameter = isinstance(weight, nn.Parameter)
        known[id(weight)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    return deepcopy(layer, known)


class Together(AbstractContextManager[None]):
    """Several contexts as one that can be entered again and again."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[object]]):
        self.makers, self.entered = makers, ExitStack()

    def __enter__(self) -> None:
        """Enter a new context of each maker, in their order."""
        with ExitStack() as entered:
            for make in self.makers:
                entered.enter_context(make())
            self.entered = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        """Leave them, the last one first."""
        self.entered.__exit__(*error)
