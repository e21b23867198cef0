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

from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TokenTree
from drafthead.heads.base import DraftHead

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

    def assert_close(self, found: torch.Tensor, expected: str | torch.Tensor) -> None:
        """Compare with a tensor, or one of the case by name, within the case's own tolerance."""
        wanted = self.io[expected] if isinstance(expected, str) else expected
        torch.testing.assert_close(found, wanted, **self.about["tolerance"])

    def assert_tree(self, tree: TokenTree, tokens: str, depths: str, mask: str) -> None:
        """Compare a tree with the case's tensors of these names."""
        assert torch.equal(tree.tokens, self.io[tokens])
        assert torch.equal(tree.depths[0], self.io[depths])
        assert torch.equal(tree.ancestors[0].float(), self.io[mask][0, 0])


def features_of(joined: torch.Tensor, head: DraftHead) -> Features:
    """Taps [B, T, D] each from taps side by side [B, T, taps x D]; the last state is not read."""
    return Features(joined[..., :1], joined.chunk(len(head.config.taps), dim=-1))


@cache
def loaded(folder: Path) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def cases(*patterns: str) -> list[Case]:
    """The cases FORMAT/CASE that match, none when the fixtures are not there."""
    return [Case(path) for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]


def name_of(case: Case) -> str:
    return f"{case.path.parent.name}/{case.path.name}"
