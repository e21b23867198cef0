"""Acceptance while decoding, against what was expected of it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS, PlannerSettings


class AcceptanceTracker:
    """How many drafts were expected to reach each depth, and how many did.

    Old steps are forgotten exponentially. At first it holds `prior_steps` steps that went as
    expected.
    """

    def __init__(self, chances: Sequence[float], settings: PlannerSettings = DEFAULT_SETTINGS):
        """`chances[d]`: the probability that a large draft is accepted to depth d + 1."""
        self.keep = 1 - 1 / settings.acceptance_memory
        self.expected = [settings.prior_steps * chance for chance in chances]
        self.observed = list(self.expected)

    def add(self, expected: Sequence[float], accept_lengths: Sequence[int]) -> None:
        """Record one step: the probability expected at each depth, and each row's accept length.

        An accept length counts the root, so 3 means that depths 1 and 2 were reached.
        """
        rows = max(1, len(accept_lengths))
        for depth, chance in enumerate(expected):
            reached = sum(length > depth + 1 for length in accept_lengths) / rows
            self.expected[depth] = self.keep * self.expected[depth] + chance
            self.observed[depth] = self.keep * self.observed[depth] + reached

    def tokens(self, expected: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens that a step commits, the bonus included: [...] for chances [..., depths].

        Each probability is scaled by observed / expected so far. Where 10 drafts of 20 were
        expected to be accepted and 5 were, 0.6 becomes 0.3.
        """
        pairs = zip(self.observed, self.expected, strict=True)
        scales = np.array([seen / hoped if hoped > 0 else 0.0 for seen, hoped in pairs])
        # No depth is reached more often than the one before it, and none more often than always.
        reached = np.minimum.accumulate(np.minimum(expected * scales, 1), axis=-1)
        return np.asarray(1 + reached.sum(-1))

    def age(self) -> None:
        """Halve the weight of everything observed so far."""
        self.expected = [value / 2 for value in self.expected]
        self.observed = [value / 2 for value in self.observed]
