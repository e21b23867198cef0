"""What a compiled graph was made of, described so that another process can tell it is the same.

A description is made of JSON's values: a model is described by its classes, by its modules' plain
attributes, and by the form of its weights. Their values are no part of it: a graph that comes from
the disk takes them from the model at hand. Of our own code a graph depends on the files of the
functions and classes that are described, on all that these import, and on the backends.
"""

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from drafthead.backends.cpu.kernels.kernel_set import kernel_set
from drafthead.core.target import weight_state
from drafthead.core.target.weight_state import COMMON, PLAIN, weights_of
from drafthead.heads.base import drafting_fields

OURS = Path(inspect.getfile(weight_state)).parents[2]  # the folder of the package
HOOKS = "_forward_hooks", "_forward_pre_hooks"
NAMED = torch.dtype, torch.device, torch.layout, torch.memory_format, Enum
# Attributes that differ between layers and only say where their keys are cached.
NUMBERS = "layer_idx", "layer_id", "layer_number", "layer_index"
CODE = type, FunctionType, BuiltinFunctionType


class UndescribedError(Exception):
    """A value of which no other process can tell whether it has the same."""


def as_config(thing: Any) -> Any:
    """The text of one of transformers' configurations; for other values raises UndescribedError."""
    if hasattr(thing, "to_json_string"):
        return thing.to_json_string()
    raise UndescribedError(f"{type(thing).__module__}.{type(thing).__qualname__}")


def digest(description: Any) -> str:
    """A short name for a description."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def described(thing: Any, unknown: Callable[[object], Any] = as_config) -> Any:
    """The description of a value; `unknown(value)` is that of values of other types."""
    if isinstance(thing, NAMED):  # before numbers, as some enumerations are numbers
        return str(thing)
    if isinstance(thing, float):
        return repr(thing)
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, torch.Tensor):
        return form(thing)
    if isinstance(thing, nn.Module):
        return [module(part, unknown) for part in thing.modules()]
    if isinstance(thing, CODE):
        return code(thing, unknown)
    return parts(thing, unknown)


def without_numbers(description: Any) -> Any:
    """A description of a layer without the attributes that number it."""
    if not isinstance(description, list):
        return description
    return [without_numbers(part) for part in description if not is_number(part)]


def is_number(part: Any) -> bool:
    """Whether a part of a description is the number of a layer: [name, number]."""
    return isinstance(part, list) and len(part) == 2 and part[0] in NUMBERS


def parts(thing: Any, unknown: Callable[[object], Any]) -> Any:
    """The description of a value that consists of others."""
    within = partial(described, unknown=unknown)
    if isinstance(thing, MethodType):
        return [code(type(thing.__self__), unknown), thing.__func__.__qualname__]
    if isinstance(thing, partial):
        return [within(part) for part in (thing.func, thing.args, thing.keywords)]
    if is_dataclass(thing):
        return [code(type(thing), unknown), within(drafting_fields(thing))]
    if isinstance(thing, Mapping):
        return [[within(key), within(value)] for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        # The order of a set differs from process to process.
        return sorted(json.dumps(within(part)) for part in thing)
    if isinstance(thing, list | tuple):
        return [within(part) for part in thing]
    return unknown(thing)


def form(tensor: torch.Tensor) -> list[Any]:
    """What code for a tensor [...] depends on."""
    layout = [tensor.stride(), tensor.storage_offset()] if tensor.layout is torch.strided else []
    learns = tensor.requires_grad and torch.is_grad_enabled()
    kind = type(tensor).__qualname__, str(tensor.dtype), str(tensor.device), learns
    return [*kind, list(tensor.shape), *layout]


def module(part: nn.Module, unknown: Callable[[object], Any]) -> list[Any]:
    """The description of a module without its submodules."""
    own = {name: value for name, value in vars(part).items() if name not in COMMON}
    if any(getattr(part, hooks) for hooks in HOOKS):
        own["hooks"] = unknown(part)
    weights = [(name, form(weight)) for name, weight in weights_of(part, recurse=False)]
    names = [name for name, _ in part.named_children()]
    return [code(type(part), unknown), part.training, names, weights, described(own, unknown)]


def code(thing: Any, unknown: Callable[[object], Any]) -> str:
    """The name of a function or a class, with the version of its code."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    if "<" in name:  # a lambda, or local to a function, which may have made several of that name
        return unknown(thing)
    return f"{name} {source_version(thing.__module__, unknown)}"


@cache
def source_version(name: str, unknown: Callable[[object], Any]) -> str:
    """A version of the code of a module: its package's, or a digest of its `sources`."""
    package = name.partition(".")[0]
    # Whole packages by version: their files are too many to read at each start.
    if package in ("torch", "transformers", "peft"):
        return version(package)
    if package == "builtins":
        return sys.version
    try:
        return digest_of(sources(Path(inspect.getfile(sys.modules[name]))))
    except (OSError, TypeError, KeyError):  # typed into an interpreter
        return unknown(name)


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the contents of files, whatever their order."""
    return digest(sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files))


def sources(*files: Path) -> set[Path]:
    """Files of Python, and those of ours that they import, or that these import in turn.

    What is traced into a graph comes from these, its constants too. An import within a function
    counts, and what is found by name does not: it is described by itself, or is a backend.
    """
    found: set[Path] = set()
    waiting = [*files]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imported_by(path)
    return found


@cache
def imported_by(path: Path) -> list[Path]:
    """The files of ours that a file of Python imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:  # a module's name, or a module
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = (name.split(".")[1:] for name in names if name.startswith("drafthead."))
    places = (place for parts in ours for place in possible_files(OURS.joinpath(*parts)))
    return [place for place in places if place.is_file()]


def possible_files(module: Path) -> tuple[Path, Path]:
    """Where the code of a module is, or of a package."""
    return module.with_suffix(".py"), module / "__init__.py"


@cache
def version_of_backends() -> str:
    """A digest of all that makes graphs, kernels in C++ included."""
    folder = OURS / "backends"
    return digest_of([*sources(*folder.rglob("*.py")), *folder.rglob("*.h")])


def surroundings() -> list[Any]:
    """What else a graph for CPUs depends on: versions, the processor, torch's settings."""
    return [
        [sys.version, torch.__version__, version("transformers")],
        version_of_backends(),
        sorted(torch.cpu.get_capabilities().items(), key=str),
        kernel_set(),
        torch.get_num_threads(),
        [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
        [str(torch.get_default_dtype()), torch.get_float32_matmul_precision()],
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
    ]
