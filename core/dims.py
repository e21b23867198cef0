"""Sizes of a function's arguments, declared once in the project's shape letters.

The declaration says which sizes may change from call to call, which of them are always equal, and,
as code for size 1 differs from code for any other size, which graph a call needs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch

# A tensor's dimensions, or those of each part of a tuple of tensors; None for what is no tensor.
Spec: TypeAlias = "str | tuple[Spec, ...] | None"
FIXED = "."
# The letter of a cache's capacity: a list that has it is written in place, call after call.
CAPACITY = "C"


class Place(NamedTuple):
    """One dimension of one tensor among the arguments of a call."""

    letter: str
    indices: tuple[int, ...]  # lead from the list of arguments to the tensor
    dim: int


def tensor_at(arguments: Sequence[Any], place: Place) -> torch.Tensor:
    """The tensor [...] of a place."""
    found: Any = arguments
    for index in place.indices:
        found = found[index]
    return found


def size_at(arguments: Sequence[Any], place: Place) -> int:
    """The size of a place."""
    return tensor_at(arguments, place).shape[place.dim]


class Dims:
    """Dimensions of a function's arguments.

    A declaration such as ``{"tokens": "B N", "mask": "B . N S", "keys": "B . C ."}`` names the
    dimensions of each tensor: equal letters are equal sizes, and ``.`` is a size that never
    changes. For a list of tensors (``keys``, one for each layer) it is the declaration of each of
    them; for a tuple of different tensors it is a tuple. An argument without a declaration is a
    constant of the graph, such as a depth; an argument may also be None.
    """

    def __init__(self, function: Callable[..., Any], specs: Mapping[str, Spec]):
        """Raises ValueError for a declaration of something that is no argument of `function`."""
        names = list(signature(function).parameters)
        if unknown := set(specs) - set(names):
            raise ValueError(f"{function} has no argument {sorted(unknown)[0]!r}")
        self.names, self.specs = names, [specs.get(name) for name in names]
        self.constants = [place for place, spec in enumerate(self.specs) if spec is None]
        self.held = [
            n for n, s in enumerate(self.specs) if isinstance(s, str) and CAPACITY in s.split()
        ]
        # For each set of arguments that are None: one place to read each letter's size from.
        self.size_places: dict[tuple[bool, ...], list[Place]] = {}

    def places(self, arguments: Sequence[Any]) -> list[Place]:
        """All declared dimensions of the arguments of a call."""
        found: list[Place] = []
        for number, (spec, argument) in enumerate(zip(self.specs, arguments, strict=False)):
            if spec is not None:
                found += places_of(spec, argument, (number,))
        return found

    def kind(self, arguments: Sequence[Any]) -> Hashable:
        """Which graph a call needs: what is None, which letters have size 1, the constants."""
        missing = tuple([argument is None for argument in arguments])
        if missing not in self.size_places:
            self.size_places[missing] = nearest(self.places(arguments))
        singles = tuple([size_at(arguments, place) == 1 for place in self.size_places[missing]])
        constants = [arguments[place] for place in self.constants if place < len(arguments)]
        return missing, singles, tuple(constants)

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise ValueError where the arguments of a call contradict the declaration."""
        for name, spec, argument in zip(self.names, self.specs, arguments, strict=False):
            if spec is None and torch.is_tensor(argument):
                raise ValueError(f"the dimensions of {name} are not declared")
        for first, *others in by_letter(self.places(arguments)):
            size, name = size_at(arguments, first), self.names[first.indices[0]]
            for other in others:
                if (found := size_at(arguments, other)) != size:
                    other_name = self.names[other.indices[0]]
                    raise ValueError(
                        f"{first.letter} is {size} in {name} and {found} in {other_name}"
                    )


def places_of(spec: Spec, argument: Any, path: tuple[int, ...]) -> list[Place]:
    """Declared dimensions of one argument. Raises ValueError for another number of dimensions."""
    if argument is None or spec is None:
        return []
    if not isinstance(argument, torch.Tensor):
        specs = spec if isinstance(spec, tuple) else (spec,) * len(argument)
        found: list[Place] = []
        for index, part in enumerate(argument):
            found += places_of(specs[index], part, (*path, index))
        return found
    assert isinstance(spec, str)
    letters = spec.split()
    if len(letters) != argument.dim():
        raise ValueError(f"a tensor of {argument.dim()} dimensions was declared as {spec!r}")
    return [Place(letter, path, dim) for dim, letter in enumerate(letters) if letter != FIXED]


def by_letter(places: Sequence[Place]) -> list[list[Place]]:
    """The places of each letter, letters in alphabetical order."""
    ordered = sorted(places, key=lambda place: place.letter)
    return [list(group) for _, group in groupby(ordered, key=lambda place: place.letter)]


def nearest(places: Sequence[Place]) -> list[Place]:
    """For each letter the place with the fewest indices."""
    return [min(group, key=lambda place: len(place.indices)) for group in by_letter(places)]
