"""Checkpoints written by the official projects' own code, with inputs and outputs; see its README.

They lie beside the repository, where they lie at all: without them the tests of formats run on what
our own exporters write.
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drafthead.core.target.target import Target

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"


@dataclass(frozen=True)
class Case:
    """A checkpoint and what the official code made of it."""

    path: Path

    @cached_property
    def about(self) -> dict[str, Any]:
        return json.loads((self.path / "case.json").read_text())

    @cached_property
    def io(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "io.safetensors")

    @cached_property
    def decode(self) -> dict[str, Any]:
        return json.loads((self.path / "decode.json").read_text())

    @property
    def target(self) -> Target:
        """The case's own target, or the one that all of its kind share."""
        for folder in (
            self.path / "target",
            self.path / self.about.get("target", "../../e2e_target"),
        ):
            if folder.is_dir():
                return loaded(folder.resolve())
        raise AssertionError(f"{self.path} has no target")

    def assert_close(self, found: torch.Tensor, name: str) -> None:
        """Compare with an expected tensor within the case's own tolerance."""
        tolerance = self.about["tolerance"]
        torch.testing.assert_close(
            found, self.io[name], atol=tolerance["atol"], rtol=tolerance["rtol"]
        )


@cache
def loaded(folder: Path) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def cases(*patterns: str) -> list[Case]:
    """The cases FORMAT/CASE that match, none when the fixtures are not there."""
    return [Case(path) for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]


def name_of(case: Case) -> str:
    return f"{case.path.parent.name}/{case.path.name}"
