"""A drafter with a chosen acceptance rate, for load tests and for measuring the engine.

It knows the answers beforehand and proposes the true token of each depth with a given probability.
So the speed at any acceptance can be measured on this machine before a head is trained.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from drafthead.core.coupling import Choice
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.sampling import Sampling
from drafthead.core.target.features import FeatureSpec
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.growing.static import tree_budgets


class Scripted(Drafter):
    """Trees whose first path is the known answer up to the first deliberate mistake."""

    features = FeatureSpec(layers=(), last=False)

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        alpha: float,
        depth: int,
        vocab_size: int,
        seed: int = 0,
    ):
        """`answers` to the prompts in their order; `alpha` is the chance that a token is right."""
        self.answers, self.alpha, self.vocab_size, self.seed = answers, alpha, vocab_size, seed
        self.budgets = tuple(
            replace(size, chances=tuple(alpha**depth for depth in range(1, size.depth + 1)))
            for size in tree_budgets(depth)
        )

    def __repr__(self) -> str:
        """The depth: the time of a proposal does not depend on what is proposed."""
        return f"scripted {self.budgets[-1].depth}"

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        return ScriptedSession(self, prompts.device)


def stem_and_leaves(budget: Budget) -> TreeShape:
    """A chain of the budget's depth; all other nodes are further children of the root."""
    stem = [(0,) * depth for depth in range(1, min(budget.depth, budget.nodes - 1) + 1)]
    leaves = [(rank,) for rank in range(1, budget.nodes - len(stem))]
    return TreeShape.from_paths([*stem, *leaves])


class ScriptedSession(DraftSession):
    """The place in each answer, and the random numbers that decide where a proposal is wrong."""

    row_state = ("answers", "places", "roots")

    def __init__(self, drafter: Scripted, device: torch.device):
        self.drafter, self.device = drafter, device
        self.answers = list(drafter.answers)
        self.places = [0] * len(self.answers)
        self.roots: list[int] = []
        self.generator = random.Random(drafter.seed)
        self.unread: list[Committed] = []

    def commit(self, committed: Committed) -> None:
        """Keep what was committed; it is read when a proposal needs it."""
        self.unread.append(committed)

    def _read(self) -> None:
        """Advance each row. The prompt pass commits only the first token of the answer."""
        for committed in self.unread:
            rows = committed.new_tokens
            gained = map(len, rows) if self.roots else [1] * len(rows)
            self.places = [old + new for old, new in zip(self.places, gained, strict=True)]
            self.roots = [tokens[-1] for tokens in rows]
        self.unread = []

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._read()
        super().keep_rows(rows)

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        self._read()
        shape = stem_and_leaves(budget)
        rows = [self._fill(row, shape) for row in range(len(self.answers))]
        return TokenTree.from_shape(shape, torch.tensor(rows, device=self.device))

    def _fill(self, row: int, shape: TreeShape) -> list[int]:
        """Tokens [N] of one row: the true one of each depth or its neighbour; leaves are wrong."""
        tokens = [self.roots[row]]
        for path in shape.paths:
            place = self.places[row] + len(path) - 1
            answer = self.answers[row]
            true = answer[place] if place < len(answer) else 0
            stem = not any(path)
            right = stem and self.generator.random() < self.drafter.alpha
            tokens.append((true + (0 if right else 1 + path[-1])) % self.drafter.vocab_size)
        return tokens
