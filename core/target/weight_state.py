"""Whether a model computes what it did: its weights, adapters and switches, cheap to compare."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef

# Attributes of every module that are described otherwise, or that no pass reads. `path_counts` were
# measured with a head: the trees that follow from them are arguments.
COMMON = frozenset(vars(nn.Module())) | {"generation_config", "name_or_path", "path_counts"}
PLAIN = None.__class__, bool, int, float, str
COPIED = *PLAIN, list, tuple, dict, set  # may change within, or be another object of the same value


def weights_of(part: nn.Module, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers [...] of a module, with their names."""
    yield from part.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from part.named_buffers(recurse=recurse, remove_duplicate=False)


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """A value that differs after weights, adapters, modules or hooks were changed or replaced.

    It is read once an answer. Passes are the same in training mode, see `Taps`, so that is no part
    of it. Not noticed are values written by way of `weight.data`, into weights that were made in
    inference mode, or into the model's configuration.
    """
    weights = [weight_state(weight) for _, weight in weights_of(model)]
    return weights, [switches(part) for part in model.modules()]


def weight_state(weight: torch.Tensor) -> tuple[Any, ...]:
    """The identity of a tensor [...], its memory, and how often that was written to.

    By weak references: another one that comes to its address later is not the same.
    """
    version = 0 if weight.is_inference() else weight._version
    memory = StorageWeakRef(weight.untyped_storage())
    return WeakIdRef(weight), memory, weight.data_ptr(), version


def switches(part: nn.Module) -> list[Any]:
    """The identity of a module, its hooks, its plain attributes and the identity of the others."""
    own = [
        value
        for name, value in vars(part).items()
        if name not in COMMON and not (name == "forward" and hasattr(value, "is_of_a_pass"))
    ]
    return [WeakIdRef(part), *map(value_or_identity, [*own, *users_hooks(part)])]


def users_hooks(part: nn.Module) -> list[Any]:
    """The forward hooks of a module without those of passes, which come and go, in any thread."""
    hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return [hook for hook in hooks if not getattr(hook, "is_of_a_pass", False)]


def value_or_identity(thing: Any) -> Any:
    """A key that equals only that of the same value, or of the same object."""
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, COPIED):
        return repr(thing)
    if isinstance(thing, torch.Tensor):
        return weight_state(thing)
    try:
        return WeakIdRef(thing)
    except TypeError:  # of a few types, whose objects are compared by value
        return thing
