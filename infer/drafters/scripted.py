"""A drafter that is right as often as it is told to be: for load tests and measuring the engine.

It knows the answers beforehand. At each depth it proposes the true token with a given probability,
so what a given acceptance would be worth on this machine can be measured before a head is trained.
"""

import random
from collections.abc import Sequence

import torch

from drafthead.heads.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.trees.static import tree_budgets
from drafthead.heads.trees.tree import Budget, TokenTree, TreeShape


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
        self.budgets = tree_budgets(depth)

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """alpha, alpha^2, ... for as deep as the tree goes."""
        return tuple(self.alpha**depth for depth in range(1, budget.depth + 1))

    def identity(self) -> str:
        """The time of a proposal does not depend on what is proposed."""
        return f"scripted {self.budgets[-1].depth}"

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session at the beginning of every answer."""
        return ScriptedSession(self, prompts.device)


def stem_and_leaves(budget: Budget) -> TreeShape:
    """A chain of the budget's depth; the nodes left over are further children of the root."""
    stem = [(0,) * depth for depth in range(1, min(budget.depth, budget.nodes - 1) + 1)]
    leaves = [(rank,) for rank in range(1, budget.nodes - len(stem))]
    return TreeShape.from_paths([*stem, *leaves])


class ScriptedSession(DraftSession):
    """How far each answer has come, and the coins that decide where a proposal goes wrong."""

    def __init__(self, drafter: Scripted, device: torch.device):
        self.drafter, self.device = drafter, device
        self.answers = list(drafter.answers)
        self.said = [0] * len(self.answers)
        self.roots: list[int] = []
        self.coins = random.Random(drafter.seed)
        self.unread: list[Committed] = []

    def commit(self, committed: Committed) -> None:
        """Note what was committed; it is read when a proposal needs it."""
        self.unread.append(committed)

    def _read(self) -> None:
        """Advance each row; the prompt pass commits the first token of the answer alone."""
        for committed in self.unread:
            gained = committed.lengths.tolist() if self.roots else [1] * len(self.said)
            self.said = [old + new for old, new in zip(self.said, gained, strict=True)]
            self.roots = committed.ends.roots.tolist()
        self.unread = []

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the state of all other rows."""
        self._read()
        kept = rows.tolist()
        self.answers = [self.answers[row] for row in kept]
        self.said = [self.said[row] for row in kept]
        self.roots = [self.roots[row] for row in kept]

    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """The known answer with its mistakes, and wrong tokens beside it."""
        self._read()
        shape = stem_and_leaves(budget)
        rows = [self._fill(row, shape) for row in range(len(self.answers))]
        return TokenTree.from_shape(shape, torch.tensor(rows, device=self.device))

    def _fill(self, row: int, shape: TreeShape) -> list[int]:
        """Tokens [N] of one row: at each depth the true one or its neighbour, leaves beyond."""
        tokens = [self.roots[row]]
        for path in shape.paths:
            place = self.said[row] + len(path) - 1
            answer = self.answers[row]
            true = answer[place] if place < len(answer) else 0
            stem = not any(path)
            right = stem and self.coins.random() < self.drafter.alpha
            tokens.append((true + (0 if right else 1 + path[-1])) % self.drafter.vocab_size)
        return tokens
