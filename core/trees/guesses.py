"""Trees that the host knows: free drafts, of which the planner keeps the best nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from drafthead.core.trees.tree import PADDING, TokenTree


@dataclass(frozen=True)
class GuessTree:
    """Nodes of a tree, without its root, parents before children; parent 0 is the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]  # logarithms of how likely nodes are accepted; never above the parent's

    @classmethod
    def chain(cls, tokens: Sequence[int], scores: Sequence[float]) -> "GuessTree":
        """Tokens after each other."""
        places = range(len(tokens))
        return cls(list(tokens), list(places), [place + 1 for place in places], list(scores))

    def order(self) -> Sequence[int]:
        """The nodes, numbered from 0 on, the best first; of equals the first."""
        scores = self.scores
        if scores == sorted(scores, reverse=True):
            return range(len(scores))
        return sorted(range(len(scores)), key=lambda node: (-scores[node], node))

    def best(self, nodes: int) -> "GuessTree":
        """The tree of the `nodes` best nodes; of equals the first.

        Nodes a, b under it, and c with scores -1, -2 and -1.5 are a and c where two are wanted.
        """
        order = self.order()
        if isinstance(order, range):  # the first ones: parents come before children
            tokens, parents = self.tokens[:nodes], self.parents[:nodes]
            return GuessTree(tokens, parents, self.depths[:nodes], self.scores[:nodes])
        kept = sorted(order[:nodes])
        numbers = {0: 0} | {node + 1: number for number, node in enumerate(kept, start=1)}
        return GuessTree(
            [self.tokens[node] for node in kept],
            [numbers[self.parents[node]] for node in kept],
            [self.depths[node] for node in kept],
            [self.scores[node] for node in kept],
        )


@dataclass(frozen=True)
class Guesses:
    """Trees of a batch that the host knows, each row its own: free drafts, before they are cut."""

    roots: Sequence[int]  # of each row
    trees: Sequence[GuessTree]  # of each row
    device: torch.device  # of the target

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the largest tree, the root included."""
        return 1 + max(len(tree.tokens) for tree in self.trees)

    @property
    def max_depth(self) -> int:
        """The most drafted tokens on one path."""
        return max(max(tree.depths, default=0) for tree in self.trees)

    def best(self, nodes: int) -> "Guesses":
        """The best `nodes` nodes of each row, the root among them."""
        return replace(self, trees=[tree.best(nodes - 1) for tree in self.trees])

    def tree(self) -> TokenTree:
        """The trees as one batch."""
        return token_tree(self.roots, self.trees, self.device)


def token_tree(roots: Sequence[int], trees: Sequence[GuessTree], device: torch.device) -> TokenTree:
    """Trees of different sizes as one batch; what is missing is padding under the root."""
    nodes = 1 + max(len(tree.tokens) for tree in trees)
    # Of each node: token, parent, depth, and which nodes are its ancestors or itself. Made here,
    # where the trees are, and copied to the device at once.
    table = np.zeros((len(trees), nodes, 3 + nodes), dtype=np.int64)
    table[:, :, 0], table[:, 0, 1], table[:, 1:, 2], table[:, :, 3] = PADDING, -1, 1, 1
    for row, root, tree in zip(table, roots, trees, strict=True):
        count = 1 + len(tree.tokens)
        row[:count, 0] = [root, *tree.tokens]
        row[1:count, 1], row[1:count, 2] = tree.parents, tree.depths
        for node, parent in enumerate(tree.parents, start=1):
            row[node, 3:] = row[parent, 3:]
            row[node, 3 + node] = 1
        row[range(count, nodes), range(3 + count, 3 + nodes)] = 1
    there = torch.from_numpy(table).to(device)
    tokens, parents, depths = (there[:, :, column].contiguous() for column in range(3))
    deepest = int(table[:, :, 2].max())
    return TokenTree(tokens, parents, depths, there[:, :, 3:].bool(), deepest, nodes - 1)


Proposal: TypeAlias = TokenTree | Guesses


def known(proposal: Proposal) -> TokenTree:
    """The proposed trees as one batch."""
    return proposal.tree() if isinstance(proposal, Guesses) else proposal


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
    tokens = proposal.tokens
    drops = ~torch.tensor(kept, device=tokens.device)[:, None].expand(tokens.shape)
    return replace(proposal, tokens=tokens.masked_fill(drops & (proposal.depths > 0), PADDING))


def drafted_tokens(proposal: Proposal | None, rows: int) -> list[int]:
    """The number of tokens proposed for each row, of a tree on a device for the largest row."""
    if proposal is None:
        return [0] * rows
    if isinstance(proposal, Guesses):
        return [len(tree.tokens) for tree in proposal.trees]
    if proposal.tokens.device.type == "cpu":
        found: list[int] = ((proposal.tokens >= 0).sum(1) - 1).tolist()
        return found
    return [proposal.num_nodes - 1] * rows
