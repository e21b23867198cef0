"""The ranks of the true tokens among a head's guesses, and the steps of decoding that follow.

A rank is the place of the true token among the head's guesses at a depth. Greedy decoding accepts
the true token and nothing else. So the ranks after all positions of an answer decide where each
step begins, with any static tree, and how many steps the answer takes.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from drafthead.core.trees.tree import Path
from drafthead.heads.objectives.batch import MAX_RANK
from drafthead.train.data.packing import PackedData

KEPT_PATHS = 512
Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True)
class RankedAnchors:
    """Ranks of the true tokens after all anchors of some conversations, in their order."""

    ranks: torch.Tensor  # [A, K]
    conversations: list[tuple[int, int]]  # of each anchor, as (row, segment)
    anchors: list[int]  # positions in the row; the root is the token after an anchor

    @classmethod
    def joined(cls, parts: Sequence["RankedAnchors"]) -> "RankedAnchors":
        """The anchors of all parts, in their order."""
        return cls(
            torch.cat([part.ranks for part in parts]).long(),
            [key for part in parts for key in part.conversations],
            [anchor for part in parts for anchor in part.anchors],
        )

    def tau(self, tree: set[Path]) -> float:
        """Tokens per pass of decoding these answers with a tree, as `DecodeStats.tau` counts them.

        The prompt's pass gives the first token of an answer, and no step begins at its last one.
        An answer of 5 tokens whose first step accepts 2 and whose second one accepts none:
        4 tokens in 2 passes.
        """
        return self.tau_by(tree, [0] * len(self.anchors)).get(0, 1.0)

    def tau_by(self, tree: set[Path], labels: Sequence[Label]) -> dict[Label, float]:
        """`tau` of the steps that begin at anchors with each of the labels [A]."""
        accepted = [accepted_in(tree, tuple(row)) for row in self.ranks.tolist()]
        places = list(zip(self.conversations, self.anchors, strict=True))
        following = [(conversation, anchor + 1) for conversation, anchor in places]
        goes_on = [a == b for a, b in zip(following, [*places[1:], None], strict=True)]
        steps = set(roots_of_steps(self.conversations, self.anchors, accepted))
        passes, tokens = Counter[Label](), Counter[Label]()
        for number, counts in enumerate(goes_on):
            if number in steps:
                label = labels[number]
                passes[label] += counts
            tokens[label] += counts
        return {name: max(1.0, tokens[name] / max(1, passes[name])) for name in set(labels)}


class Ranked(NamedTuple):
    """Answers, and the ranks of their tokens among a head's guesses."""

    ranks: RankedAnchors
    data: PackedData


def chain_lengths(ranks: torch.Tensor) -> torch.Tensor:
    """Return how many first guesses are right in a row, [A], from ranks [A, K].

    Ranks 0 0 3 0 make a chain of 2.
    """
    return (ranks == 0).long().cumprod(dim=1).sum(dim=1)


def count_paths(ranks: torch.Tensor, keep: int = KEPT_PATHS) -> dict[Path, int]:
    """Return how often each path of guesses was the true continuation, from ranks [A, K].

    Ranks 0 2 MAX_RANK count the paths (), (0,) and (0, 2). The `keep` most frequent are returned;
    a path is never more frequent than its beginning, so they form a tree.
    """
    counts: Counter[Path] = Counter({(): ranks.shape[0]})
    for depth in range(1, ranks.shape[1] + 1):
        inside = ranks[(ranks[:, :depth] < MAX_RANK).all(dim=1), :depth]
        paths, times = inside.unique(dim=0, return_counts=True)
        counts.update(dict(zip(map(tuple, paths.tolist()), times.tolist(), strict=True)))
    ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return {path: counts[path] for path in ordered[:keep]}


def accepted_in(tree: set[Path], ranks: Path) -> int:
    """The number of true tokens of these ranks in a row in a tree: 1 for (0, 1) and a chain."""
    depth = 0
    while depth < len(ranks) and ranks[: depth + 1] in tree:
        depth += 1
    return depth


def roots_of_steps(
    conversations: list[tuple[int, int]], anchors: list[int], accepted: list[int]
) -> list[int]:
    """The numbers of the anchors that decoding drafts from.

    A conversation's first anchor, and then always the one that is `accepted` + 1 tokens further.
    With anchors 3 4 5 6 7 and accepted 2 0 0 0 0 these are anchors 3, 6 and 7: numbers 0, 3, 4.
    """
    chosen: list[int] = []
    current, next_place = None, 0
    for number, (conversation, anchor) in enumerate(zip(conversations, anchors, strict=True)):
        if conversation != current or anchor >= next_place:
            chosen.append(number)
            current, next_place = conversation, anchor + accepted[number] + 1
    return chosen
