"""The most promising tree of what may follow, by what speaks for each text."""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from drafthead.core.trees.guesses import GuessTree


class Following(Protocol):
    """A token, and what may follow it."""

    @property
    def weight(self) -> float:
        """Return how much speaks for it; never more than for its parent."""
        ...

    @property
    def children(self) -> Mapping[int, "Following"]:
        """Return what may follow, by token."""
        ...


class GrowingTree:
    """A tree that nodes are added to, and the best of them."""

    def __init__(self) -> None:
        self.tree = GuessTree([], [], [], [])
        self.known: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        """The number of nodes, without the root."""
        return len(self.tree.tokens)

    def depth(self, node: int) -> int:
        """The depth of a node; 0 for the root, which is node 0."""
        return self.tree.depths[node - 1] if node else 0

    def add(self, parent: int, token: int, score: float) -> int:
        """The child of a node with a token. One that is there keeps the better of both scores."""
        tree = self.tree
        # A child above its parent could be chosen without it.
        if parent:
            score = min(score, tree.scores[parent - 1])
        node = self.known.get((parent, token))
        if node is not None:
            tree.scores[node - 1] = max(score, tree.scores[node - 1])
            return node
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(self.depth(parent) + 1)
        tree.scores.append(score)
        node = self.known[parent, token] = len(tree.tokens)
        return node

    def add_tree(self, tree: GuessTree) -> None:
        """Add all nodes of another tree with the same root."""
        nodes = [0]
        for parent, token, score in zip(tree.parents, tree.tokens, tree.scores, strict=True):
            nodes.append(self.add(nodes[parent], token, score))

    def add_heaviest(
        self, root: Following, reached: Sequence[float], nodes: int, depth: int
    ) -> None:
        """Add the heaviest texts until there are `nodes` nodes, to a depth.

        `reached[d]` is the chance that one of the texts is right to depth d + 1. A node has its
        share of it by weight, so a child never more than its parent. Of texts ``b c`` with weight 2
        and ``b d`` and ``e`` with weight 1, three nodes are b, c under it, and d or e.

        What may follow a node is looked up when the most that it can promise is next in turn.
        """
        # Negated chance, order (of equal chances the first goes first), a node, and the token to
        # add under it with what it begins; no token where the node's children are not known yet.
        heap: list[tuple[float, int, int, int | None, Following]] = []
        order = 0

        def push(above: int, token: int | None, following: Following) -> None:
            nonlocal order
            order += 1
            # Of no texts at all the weight is 0.
            chance = following.weight and following.weight / root.weight
            chance *= reached[self.depth(above)]
            heapq.heappush(heap, (-chance, order, above, token, following))

        push(0, None, root)
        while heap and len(self) < nodes:
            chance, _, above, token, following = heapq.heappop(heap)
            if token is None:
                for child, after in following.children.items():
                    push(above, child, after)
                continue
            node = self.add(above, token, math.log(-chance) if chance < 0 else -math.inf)
            if self.depth(node) < depth:
                push(node, None, following)

    def best(self, nodes: int) -> GuessTree:
        """The tree of the `nodes` best nodes, see `GuessTree.best`."""
        return self.tree.best(nodes)
