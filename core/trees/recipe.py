"""Trees whose tokens are computed in the step's graph, before the pass that verifies them.

A small drafting pass takes longer to call than to compute, so a step's graph that begins with it
saves the call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from drafthead.core.dims import Spec
from drafthead.core.trees.guesses import Guesses
from drafthead.core.trees.tree import PADDING, TokenTree, TreeShape

# The token and the parent of a node that only fills up a tree. No token is equal to it: PADDING
# is what a model with NaN logits gives, NO_TOKEN.
NO_NODE = -2


@dataclass(frozen=True)
class TokenFiller:
    """What a graph computes a tree's tokens [B, N] with: a function of tensors alone.

    `dims` declares the dimensions of each argument, see `heads.dims`; `reads` are the models
    and other values that the function reads beside them.
    """

    tokens: Callable[..., torch.Tensor]
    dims: tuple[Spec, ...]
    reads: tuple[object, ...] = ()
    alone: Callable[..., torch.Tensor] | None = None  # the same outside of a step, where compiled


@dataclass(frozen=True)
class TreeRecipe:
    """A tree as the graph of a step takes it: its form, and how its tokens are computed."""

    parents: torch.Tensor  # [B, N], -1 for the root
    depths: torch.Tensor  # [B, N]
    ancestors: torch.Tensor  # [B, N, N] bool
    max_depth: int
    filler: TokenFiller
    arguments: tuple[Any, ...]  # tensors, tuples of them, or None; the first is a tensor
    scores: torch.Tensor | None = None  # [N] or [B, N] of the nodes, see `TokenTree`

    @classmethod
    def of(cls, tree: TokenTree) -> "TreeRecipe":
        """A tree whose tokens are known."""
        form = tree.parents, tree.depths, tree.ancestors, tree.max_depth
        return cls(*form, KNOWN, (tree.tokens,), tree.scores)

    @classmethod
    def from_shape(
        cls,
        shape: TreeShape,
        rows: int,
        filler: TokenFiller,
        arguments: tuple[Any, ...],
        scores: torch.Tensor | None = None,  # [N]
    ) -> "TreeRecipe":
        """A static tree with tables [B, N] for B = `rows`, on the device of the arguments."""
        tables = shape.tables(rows, arguments[0].device)
        return cls(*tables, shape.depth, filler, arguments, scores)

    @property
    def num_nodes(self) -> int:
        """Number N of nodes, the root included."""
        return self.parents.shape[1]

    def padded(self, nodes: int) -> "TreeRecipe":
        """This tree padded to `nodes` nodes. Padding nodes attend only to themselves.

        Tables of two nodes, padded to four::

            parents -1 0 -2 -2     depths 0 1 0 0     ancestors  1 . . .
                                                                 1 1 . .
                                                                 . . 1 .
                                                                 . . . 1
        """
        missing = nodes - self.num_nodes
        if missing == 0:
            return self
        places = torch.arange(nodes, device=self.parents.device)
        itself = (places[:, None] == places) & (places >= self.num_nodes)
        ancestors = of_stored(self.ancestors, lambda t: pad(t, (0, missing) * 2) | itself)
        return replace(
            self,
            parents=of_stored(self.parents, lambda t: pad(t, (0, missing), value=NO_NODE)),
            depths=of_stored(self.depths, lambda t: pad(t, (0, missing))),
            ancestors=ancestors,
            arguments=tuple(
                filled_up(argument, spec, missing)
                for argument, spec in zip(self.arguments, self.filler.dims, strict=True)
            ),
        )


def of_stored(table: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The table [B, ...] changed row by row; rows that are all one stay that."""
    if table.stride(0) != 0:
        return change(table)
    changed = change(table[:1])
    return changed.expand(len(table), *changed.shape[1:])


def filled_up(argument: Any, spec: Spec, missing: int) -> Any:
    """An argument of a filler with `missing` more zeros along each dimension of nodes."""
    if argument is None:
        return None
    if not isinstance(argument, torch.Tensor):
        specs = spec if isinstance(spec, tuple) else (spec,) * len(argument)
        parts = (filled_up(*pair, missing) for pair in zip(argument, specs, strict=True))
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    assert isinstance(spec, str)
    widths = [(0, missing if letter == "N" else 0) for letter in reversed(spec.split())]
    return pad(argument, [width for pair in widths for width in pair])


def as_given(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, N] that are known already."""
    return tokens


KNOWN = TokenFiller(as_given, dims=("B N",))
Proposal: TypeAlias = TokenTree | TreeRecipe | Guesses


def known(proposal: Proposal) -> TokenTree:
    """The proposed tree, with its tokens computed now where they were to be in the step's graph."""
    if isinstance(proposal, TokenTree):
        return proposal
    if isinstance(proposal, Guesses):
        return proposal.tree()
    filler, form = proposal.filler, (proposal.parents, proposal.depths, proposal.ancestors)
    tokens = (filler.alone or filler.tokens)(*proposal.arguments)
    widest = proposal.num_nodes - 1
    return TokenTree(tokens, *form, proposal.max_depth, widest, scores=proposal.scores)


def only(proposal: Proposal, kept: Sequence[bool] | None) -> Proposal:
    """The proposal with nothing but the root for the rows that are not `kept`; None keeps all.

    For rules that follow the target's own tokens: what was drawn cannot be left out.
    """
    if kept is None or all(kept):
        return proposal
    if isinstance(proposal, Guesses):
        trees = [
            tree if keep else tree.best(0) for tree, keep in zip(proposal.trees, kept, strict=True)
        ]
        return replace(proposal, trees=trees)
    tree = known(proposal)
    drops = ~torch.tensor(kept, device=tree.tokens.device)[:, None].expand(tree.tokens.shape)
    return replace(tree, tokens=tree.tokens.masked_fill(drops & (tree.depths > 0), PADDING))


def drafted_tokens(proposal: Proposal | None, rows: int) -> list[int]:
    """How many tokens are proposed for each row, of a tree on a device for the largest row."""
    if proposal is None:
        return [0] * rows
    if isinstance(proposal, Guesses):
        return [len(tree.tokens) for tree in proposal.trees]
    if isinstance(proposal, TokenTree) and proposal.tokens.device.type == "cpu":
        found: list[int] = ((proposal.tokens >= 0).sum(1) - 1).tolist()
        return found
    return [proposal.num_nodes - 1] * rows
