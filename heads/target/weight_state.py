"""Whether a model computes what it did: its weights, adapters and switches, cheap to compare."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

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
    """What differs after weights or adapters of a model were changed, replaced or switched.

    It is read once an answer. Values written by way of `weight.data` are not noticed.
    """
    versions = [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for _, weight in weights_of(model)
    ]
    return versions, [switches(part) for part in model.modules()]


def switches(part: nn.Module) -> list[Any]:
    """The values of a module's plain attributes, and which objects the others are."""
    own = (value for name, value in vars(part).items() if name not in COMMON)
    return [
        part.training,
        *(repr(value) if isinstance(value, COPIED) else id(value) for value in own),
    ]
