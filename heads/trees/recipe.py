"""Trees whose tokens are computed in the step's graph, before the pass that verifies them.

A small drafting pass takes longer to call than to compute, so a step's graph that begins with it
saves the call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drafthead.heads.graphs.dims import Spec
from drafthead.heads.trees.tree import TokenTree, TreeShape


@dataclass(frozen=True)
class TokenFiller:
    """What a graph computes a tree's tokens [B, N] with: a function of tensors alone.

    `dims` declares the dimensions of each argument, see `heads.graphs.dims`; `reads` are the models
    and other values that the function reads beside them.
    """

    tokens: Callable[..., torch.Tensor]
    dims: tuple[Spec, ...]
    reads: tuple[object, ...] = ()


@dataclass(frozen=True)
class TreeRecipe:
    """A tree as the graph of a step takes it: its form, and how its tokens are computed."""

    parents: torch.Tensor  # [B, N], -1 for the root
    depths: torch.Tensor  # [B, N]
    ancestors: torch.Tensor  # [B, N, N] bool
    max_depth: int
    filler: TokenFiller
    arguments: tuple[Any, ...]  # tensors, tuples of them, or None; the first is a tensor

    @classmethod
    def of(cls, tree: TokenTree) -> "TreeRecipe":
        """A tree whose tokens are known."""
        form = tree.parents, tree.depths, tree.ancestors, tree.max_depth
        return cls(*form, KNOWN, (tree.tokens,))

    @classmethod
    def from_shape(
        cls, shape: TreeShape, rows: int, filler: TokenFiller, arguments: tuple[Any, ...]
    ) -> "TreeRecipe":
        """A static tree with tables [B, N] for B = `rows`, on the device of the arguments."""
        tables = shape.tables(rows, arguments[0].device)
        return cls(*tables, shape.depth, filler, arguments)

    @property
    def num_nodes(self) -> int:
        """Number N of nodes, the root included."""
        return self.parents.shape[1]


def as_given(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, N] that are known already."""
    return tokens


KNOWN = TokenFiller(as_given, dims=("B N",))
