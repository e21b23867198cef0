"""A compiled graph on the disk: its code and how to call it, without its weights.

Where there is one, torch need not trace and generate code again, which takes most of a minute.
torch's own cache keeps the compiled code, of which ours holds the source.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor import config

from drafthead.backends.cpu.layouts import Layout
from drafthead.backends.cpu.recipes import Recipe, cooked, has_gap
from drafthead.core.storage.disk_cache import cache_folder, read_cached, write_cached

logger = logging.getLogger(__name__)

ARGUMENTS = "L['arguments']"  # how torch's expressions for what is passed begin


class GraphRecord(NamedTuple):
    """What is needed to call a graph; all of it is JSON."""

    inputs: list[str]  # their places among the arguments, as torch's expressions
    same: list[str]  # conditions on the arguments: which of them are one object
    layout: Layout
    value: dict[str, Any]  # how the function's value is put together, see `assembly`
    source: str  # Python, with C++ in it
    constants: dict[str, Recipe]  # global names of the source

    def reader(self) -> Callable[[dict[str, Any]], list[Any] | None]:
        """What finds the inputs in {"arguments": arguments}: None where arguments differ that were
        one object.
        """
        # torch's own expressions, such as L['arguments'][7][0].size()[2], which it also evaluates
        # to check its conditions.
        condition = f" if {' and '.join(self.same)} else None" if self.same else ""
        return eval(f"lambda L: [{', '.join(self.inputs)}]{condition}")

    def is_met(self, arguments: Sequence[Any]) -> bool:
        """Whether the graph was made for arguments of this layout."""
        inputs = self.reader()({"arguments": arguments})
        return inputs is not None and self.layout.is_met(inputs)

    def load(self, reads: Sequence[Any]) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        """The generated code, with the weights of the models and other values `reads`."""
        names = {name: cooked(recipe, reads) for name, recipe in self.constants.items()}
        exec(compile(self.source, "<a compiled graph>", "exec"), names)
        return names["call"]

    def text(self) -> str:
        """The content of a file: a checksum in the first line."""
        body = json.dumps(self._asdict() | {"layout": self.layout._asdict()})
        return f"{checksum(body)}\n{body}"

    @classmethod
    def of_text(cls, text: str) -> "GraphRecord":
        """The inverse of `text`; raises ValueError for a damaged file."""
        found, _, body = text.partition("\n")
        if found != checksum(body):
            raise ValueError("it is damaged")
        fields = json.loads(body)
        return cls(**fields | {"layout": Layout(**fields["layout"])})


def checksum(text: str) -> str:
    """A digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def twins(arguments: Sequence[Any]) -> list[str]:
    """Conditions for tensors that are passed twice: torch then gives the graph one of them."""
    found: dict[int, str] = {}
    same = []

    def visit(value: Any, path: str) -> None:
        """Note the tensors in a value that is found at `path`."""
        if isinstance(value, torch.Tensor):
            first = found.setdefault(id(value), path)
            if first != path:
                same.append(f"{first} is {path}")
        elif isinstance(value, list | tuple):
            for place, part in enumerate(value):
                visit(part, f"{path}[{place}]")

    visit(arguments, ARGUMENTS)
    return same


def folder_of(key: str) -> Path:
    """Where the records of one kind are kept: one for each layout of arguments."""
    return cache_folder("graphs") / key


def records(key: str) -> Iterator[tuple[Path, GraphRecord]]:
    """The records of one kind. One sentence is logged for a file that cannot be used."""
    if config.force_disable_caches:
        return
    for path in sorted(folder_of(key).glob("*.json")):
        try:
            yield path, GraphRecord.of_text(read_cached(path) or "")
        except (ValueError, TypeError, KeyError) as error:
            log_useless(path, error)


def keep(key: str, record: GraphRecord) -> None:
    """Write a record for later processes, if that is possible."""
    if config.force_disable_caches or has_gap(list(record.constants.values())):
        return
    text = record.text()
    write_cached(folder_of(key) / f"{checksum(record.layout.__repr__())[:16]}.json", text)


def log_useless(path: Path, error: Exception) -> None:
    """Log that a graph is made again."""
    logger.warning("%s cannot be used (%s): the graph is compiled again", path, error)
