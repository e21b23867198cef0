"""The most promising tree of what may follow, from texts that followed before."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Counted:
    """A token of some texts, and what follows it there."""

    __slots__ = ("children", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.children: dict[int, Counted] = {}

    @classmethod
    def of(cls, texts: Iterable[tuple[float, Sequence[int]]]) -> "Counted":
        """The common root of weighted texts; a negative token ends a text."""
        root = cls()
        for weight, text in texts:
            node = root
            for token in text:
                if token < 0:
                    break
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = cls()
                child.weight += weight
                node = child
        return root


@dataclass(frozen=True)
class GuessTree:
    """Nodes of a tree, without its root, parents before children; parent 0 is the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    @classmethod
    def grown(cls, first: Sequence[int], counted: Counted, nodes: int, depth: int) -> "GuessTree":
        """Up to `nodes` nodes: the chain `first`, then the heaviest continuations.

        A node counts as much as the texts that go through it, so a child never more than its
        parent. From ``b c`` with weight 2 and ``b d`` and ``e`` with weight 1, three nodes are
        b, c under it, and d or e.
        """
        tree = cls([], [], [])
        known: dict[tuple[int, int], int] = {}  # (parent, token) -> node

        def node(parent: int, token: int) -> int:
            """The child of a node, which is made if it is new."""
            if (parent, token) not in known:
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.depths.append(tree.depths[parent - 1] + 1 if parent else 1)
                known[parent, token] = len(tree.tokens)
            return known[parent, token]

        place = 0
        for token in first[: min(nodes, depth)]:
            place = node(place, token)
        heap: list[tuple[float, int, int, int, Counted]] = []
        order = 0  # of equal weights the first goes first

        def open_children(parent: int, above: Counted) -> None:
            nonlocal order
            for token, child in above.children.items():
                order += 1
                heapq.heappush(heap, (-child.weight, order, parent, token, child))

        open_children(0, counted)
        while heap and len(tree.tokens) < nodes:
            _, _, parent, token, child = heapq.heappop(heap)
            place = node(parent, token)
            if tree.depths[place - 1] < depth:
                open_children(place, child)
        return tree
