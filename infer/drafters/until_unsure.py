"""Ends of drafts before their budget is used, where one more pass no longer pays.

A step brings G tokens in T seconds, and decoding E[G] / E[T] = r tokens per second. One more level
of a draft brings a token with the probability

    P(a path is accepted to here) x alpha_next

and takes t seconds. It raises the quotient if that probability is above r x t, the tokens that its
time would bring otherwise, and else lowers it (this is Dinkelbach's rule for quotients, 1967). The
planner knows r and t and gives r x t as `Budget.least_chance`.

The draft's own guess of P is the product of its probabilities along the path, or the sum of these
over the open paths of a tree. Others stop where the last token's probability is below 0.4
(transformers' `assistant_confidence_threshold`, refitted by the errors that it made; Mamou et al.,
2024, arXiv 2405.04304), or where a trained head takes a refusal to be likely (SpecDec++, Huang et
al., 2024, arXiv 2405.19715). EAGLE-2 found that the product is close to the acceptance (arXiv
2406.16858); what it is off by is learnt here from every draft, and so is alpha_next.

The host must read a number after each level, for which it waits on a GPU. So there drafts use their
budget.
"""

from collections.abc import Sequence
from statistics import fmean

import torch

from drafthead.core.host import to_host
from drafthead.core.trees.tree import UNMEASURED_ALPHA
from drafthead.infer.planning.draft_acceptance import FIRST_WEIGHT, MEMORY, Calibration

STOP_WEIGHT = 0.1  # of a level that was not drafted, as which the first belief counts again


class Sureness:
    """The acceptance of drafts to a level, against the draft's own guesses of that.

    Guesses are judged by their size: those of the demo draft model come true where they are above
    a half, and are two to three times too low below an eighth, where the decision mostly falls.
    Several threads may teach it; if one addition overwrites another, little is lost.
    """

    def __init__(self) -> None:
        self.chance = Calibration()  # that a path is accepted to a level, by the draft's guess
        # Of levels that were followed by another: chances that they were accepted, and how often
        # the one after them was. The quotient is alpha_next.
        self.reached = FIRST_WEIGHT
        self.passed = FIRST_WEIGHT * UNMEASURED_ALPHA

    def next_chance(self, guess: float) -> float:
        """The probability for the level after, of which the draft knows nothing yet."""
        return self.chance(guess) * min(1.0, self.passed / self.reached)

    def add(self, guesses: Sequence[float], levels: int, accepted: int) -> None:
        """Record a draft of so many levels that was accepted to a level, 0 for none of it.

        `guesses` are those of its levels; the last one is there if the draft stopped by itself. The
        level that was not drafted was not refused. It counts a little as if nothing were known of
        alpha_next: a model that was wrong for long would else never be given another chance.
        """
        keep = 1 - 1 / MEMORY
        for level, guess in enumerate(guesses, 1):
            chance = self.chance(guess)
            weight, followed = 1.0, float(accepted > level)
            if level == levels:
                weight, followed = STOP_WEIGHT, UNMEASURED_ALPHA * chance
            self.reached = keep * self.reached + weight * chance
            self.passed = keep * self.passed + weight * followed
            self.chance.add(guess, accepted >= level)


class OneDraft:
    """A draft of a batch while it grows: whether it goes on, and in the end what came of it."""

    def __init__(self, sureness: Sureness, least_chance: float):
        """`least_chance` is that of the budget."""
        self.sureness, self.least_chance = sureness, least_chance
        self.guesses: list[list[float]] = []  # of each level, by row

    def goes_on(self, scores: torch.Tensor) -> bool:
        """Whether another level pays, by scores [B, F] of the F open paths: logarithms of values.

        A level is one pass for all rows, so what counts is what it brings a row on average.
        """
        self.guesses.append(to_host(scores.exp().sum(-1).clamp_max(1)))
        chances = map(self.sureness.next_chance, self.guesses[-1])
        return fmean(chances) >= self.least_chance

    def learn(self, levels: int, accept_lengths: Sequence[int]) -> None:
        """Record what became of its levels: tokens that each row committed, the bonus included."""
        for row, length in enumerate(accept_lengths):
            guesses = [of_level[row] for of_level in self.guesses]
            self.sureness.add(guesses, levels, length - 1)
