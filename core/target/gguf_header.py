"""The keys and tensors of a GGUF file, as ggml's docs/gguf.md describes them.

The reader of the package `gguf` makes NumPy arrays of each token of a vocabulary, and so takes
eight seconds for what takes less than one here.
"""

import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.mapped_files import map_file

# How `struct` reads the types of values that are numbers.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a string
VERSIONS = (2, 3)
# Architectures of which files were compared with what they were written from, by the tests.
COMPARED = (
    "gemma2", "gemma3", "gpt2", "llama", "nemotron", "phi3", "qwen2", "qwen2moe", "qwen3",
    "qwen3moe", "stablelm", "starcoder2",
)  # fmt: skip


class Tensor(NamedTuple):
    """A tensor of a file, of which nothing is read yet."""

    kind: str  # such as F32 or Q4_K
    raw: torch.Tensor  # [..., bytes of a row] uint8, of the mapped file

    def values(self, rows: Any = ...) -> torch.Tensor:
        """Its numbers [..., K] in float32, as the package `gguf` reads them; of some rows."""
        found = dequantize(self.raw[rows].numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.array(found, np.float32))


class GgufFile:
    """The keys and tensors of a mapped file, and which keys were read for its model."""

    def __init__(self, path: Path):
        """Raises UserError for a file that is no whole GGUF file, or one part of several, and for
        an architecture whose files were never compared with what they were written from.
        """
        self.path = path
        self.used: set[str] = set()
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file: its first four bytes are not GGUF")
        self.content, self.at = map_file(path), 4
        try:
            (version, tensors, keys) = (self.number(form) for form in "IQQ")
            if version not in VERSIONS:
                raise UserError(f"{path} has version {version} of GGUF: write it with version 3")
            self.fields = {self.string(): self.value(self.number("I")) for _ in range(keys)}
            described = [self.description() for _ in range(tensors)]
            start = self.at + -self.at % self.count_of("general.alignment", 32)
            self.tensors = {
                name: self.tensor(start, sizes, kind, place)
                for name, sizes, kind, place in described
            }
        except UserError:
            raise
        except (struct.error, ValueError, KeyError, RuntimeError) as error:
            raise UserError(
                f"{path} is damaged or was not downloaded to its end ({type(error).__name__}: "
                f"{first_line(error)}): fetch it again"
            ) from error
        self.architecture = str(self.get("general.architecture"))
        self.refuse_others()

    def refuse_others(self) -> None:
        """Raise UserError for what is no whole model of an architecture that was compared."""
        path = self.path
        if (kind := self.fields.get("general.type", "model")) != "model":
            raise UserError(f"{path} holds no model but what general.type calls {kind!r}")
        # 0 in files that llama-gguf-split has joined.
        if (parts := self.count_of("split.count", 1, least=0)) > 1:
            raise UserError(
                f"{path} is one of {parts} parts: join them with "
                "`llama-gguf-split --merge` and name the result"
            )
        if self.architecture not in COMPARED:
            raise UserError(
                f"{path} has the architecture {self.architecture}, of which no file was compared "
                "with its model: use a folder of transformers' files, or one of "
                f"{', '.join(COMPARED)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as used; `default` where there is none."""
        if key in self.fields:
            self.used.add(key)
        return self.fields.get(key, default)

    def count_of(self, key: str, default: int, least: int = 1) -> int:
        """The value of a key that is a number of something; UserError where it can be none."""
        value = self.fields.get(key, default)
        if type(value) is not int or value < least:
            raise self.refusal(key, f"which must be a number from {least} on: fetch it again")
        return value

    def of_model(self, name: str, default: Any = None) -> Any:
        """The value of one of the architecture's keys, one number where each layer has the same."""
        value = self.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        return value

    def refusal(self, key: str, why: str) -> UserError:
        """The error for a key that the model cannot follow."""
        return UserError(f"{self.path} cannot be read: {key} is {self.fields[key]}, {why}")

    def number(self, form: str) -> Any:
        """The next number, of a form of `struct`."""
        (value,) = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def string(self) -> str:
        """The next string."""
        (size,) = LENGTH.unpack_from(self.content, self.at)
        start = self.at + LENGTH.size
        self.at = start + size
        if self.at > len(self.content):
            raise ValueError("a string goes past the end")
        return self.content[start : self.at].decode()

    def value(self, kind: int) -> Any:
        """The next value of a type; a list for an array."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner not in NUMBERS:
            read = self.string if inner == STRING else lambda: self.value(inner)
            return [read() for _ in range(count)]
        form = f"<{count}{NUMBERS[inner]}"
        values = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return list(values)

    def description(self) -> tuple[str, list[int], int, int]:
        """The next tensor's name, dimensions, type and place."""
        name = self.string()
        sizes = [self.number("Q") for _ in range(self.number("I"))]
        return name, sizes[::-1], self.number("I"), self.number("Q")

    def tensor(self, start: int, sizes: list[int], kind: int, place: int) -> Tensor:
        """The tensor [..., bytes] of a description, where the first begins at `start`."""
        known = GGMLQuantizationType(kind)
        values, size = GGML_QUANT_SIZES[known]
        *outer, inner = sizes
        row = [*outer, inner // values * size]
        raw = torch.frombuffer(
            self.content, dtype=torch.uint8, count=prod(row), offset=start + place
        )
        return Tensor(known.name, raw.view(row))
