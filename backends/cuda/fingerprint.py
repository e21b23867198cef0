"""The description of a decoder layer, made so that layers of one kind share compiled code.

A description is made of JSON's values: a model is described by its classes, by its modules' plain
attributes, and by the form of its weights. Their values are no part of it.
"""

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from drafthead.core.target.weight_state import COMMON, PLAIN, weights_of

HOOKS = "_forward_hooks", "_forward_pre_hooks"
NAMED = torch.dtype, torch.device, torch.layout, torch.memory_format, Enum
# Attributes that differ between layers and only say where their keys are cached.
NUMBERS = "layer_idx", "layer_id", "layer_number", "layer_index"
CODE = type, FunctionType, BuiltinFunctionType


class UndescribedError(Exception):
    """A value of which nobody can tell whether another one is the same."""


def digest(description: Any) -> str:
    """A short name for a description."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def described(thing: Any) -> Any:
    """The description of a value; raises UndescribedError for values of unknown types."""
    if isinstance(thing, NAMED):  # before numbers, as some enumerations are numbers
        return str(thing)
    if isinstance(thing, float):
        return repr(thing)
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, torch.Tensor):
        return form(thing)
    if isinstance(thing, nn.Module):
        return [module(part) for part in thing.modules()]
    if isinstance(thing, CODE):
        return code(thing)
    return parts(thing)


def without_numbers(description: Any) -> Any:
    """A description of a layer without the attributes that number it."""
    if not isinstance(description, list):
        return description
    return [without_numbers(part) for part in description if not is_number(part)]


def is_number(part: Any) -> bool:
    """Whether a part of a description is the number of a layer: [name, number]."""
    return isinstance(part, list) and len(part) == 2 and part[0] in NUMBERS


def parts(thing: Any) -> Any:
    """The description of a value that consists of others."""
    if isinstance(thing, MethodType):
        return [code(type(thing.__self__)), thing.__func__.__qualname__]
    if isinstance(thing, partial):
        return [described(part) for part in (thing.func, thing.args, thing.keywords)]
    if isinstance(thing, Mapping):
        return [[described(key), described(value)] for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        # The order of a set differs from process to process.
        return sorted(json.dumps(described(part)) for part in thing)
    if isinstance(thing, list | tuple):
        return [described(part) for part in thing]
    if hasattr(thing, "to_json_string"):  # one of transformers' configurations
        return thing.to_json_string()
    raise UndescribedError(f"{type(thing).__module__}.{type(thing).__qualname__}")


def form(tensor: torch.Tensor) -> list[Any]:
    """The properties of a tensor [...] on which code depends."""
    layout = [tensor.stride(), tensor.storage_offset()] if tensor.layout is torch.strided else []
    learns = tensor.requires_grad and torch.is_grad_enabled()
    kind = type(tensor).__qualname__, str(tensor.dtype), str(tensor.device), learns
    return [*kind, list(tensor.shape), *layout]


def module(part: nn.Module) -> list[Any]:
    """The description of a module without its submodules."""
    if any(getattr(part, hooks) for hooks in HOOKS):
        raise UndescribedError(f"a hook on {type(part).__qualname__}")
    own = {name: value for name, value in vars(part).items() if name not in COMMON}
    weights = [(name, form(weight)) for name, weight in weights_of(part, recurse=False)]
    names = [name for name, _ in part.named_children()]
    return [code(type(part)), part.training, names, weights, described(own)]


def code(thing: Any) -> str:
    """The name of a function or a class."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    if "<" in name:  # a lambda, or local to a function, which may have made several of that name
        raise UndescribedError(name)
    return name
