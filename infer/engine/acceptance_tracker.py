"""Acceptance while decoding, against what was expected of it."""

from collections.abc import Mapping, Sequence

import numpy as np

from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.draft_lengths import DraftLengths, Stops, at_its_end
from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS, PlannerSettings
from drafthead.infer.engine.step_costs import Table


class Expectations:
    """What a step of each size brings where proposals are of one kind, as drafts teach it.

    A draft that may stop early brings a token of depth 3 if it goes that far and is right that far.
    The two are learnt apart: what was not drafted was not refused.
    """

    def __init__(
        self,
        sizes: Sequence[Budget | None],
        chances: Mapping[Budget, Sequence[float]],
        stops: Stops = at_its_end,
        settings: PlannerSettings = DEFAULT_SETTINGS,
    ):
        """`chances[budget][d]` is the probability, as far as known before decoding, that a draft
        within the budget is accepted to depth d + 1.
        """
        self.chances = chances
        self.lengths = DraftLengths(sizes, stops, settings)
        deepest = max(map(len, chances.values()))
        self.table = np.zeros((len(sizes), deepest))  # chances [S, depths]
        self.places: dict[str, list[int]] = {}  # of the sizes of each source
        for place, size in enumerate(sizes):
            if size is not None:
                self.table[place, : len(chances[size])] = chances[size]
                self.places.setdefault(size.source, []).append(place)
        # Drafts that cannot bring anything [S], as nothing was found to propose.
        self.hopeless = (self.table.max(axis=1) == 0) & [size is not None for size in sizes]
        # What one source guesses well another may not.
        self.trackers = {}
        for source in self.places:
            of_source = [chance for size, chance in chances.items() if size.source == source]
            self.trackers[source] = AcceptanceTracker(max(of_source, key=len), settings)

    def tokens(self) -> Table:
        """Tokens that a step of each size commits, the bonus included [S]."""
        found = np.ones(len(self.table))
        drafted = self.lengths.drafted(self.table.shape[1])
        for source, tracker in self.trackers.items():
            places, depths = self.places[source], len(tracker.expected)
            found[places] = tracker.tokens(self.table[places, :depths], drafted[places, :depths])
        return found

    def add(self, budget: Budget, made: Budget, accept_lengths: Sequence[int]) -> None:
        """Record one step: the size of its draft, at which of its stops that ended, and the tokens
        that each row committed.
        """
        self.lengths.add(budget, made)
        self.trackers[made.source].add(self.chances[made], accept_lengths)

    def age(self) -> None:
        """Halve the weight of everything observed so far."""
        for tracker in self.trackers.values():
            tracker.age()


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

    def tokens(
        self,
        expected: Table,  # [..., depths] chances of each depth where it is drafted
        drafted: Table,  # [..., depths] how often it is
    ) -> Table:
        """Tokens that a step commits, the bonus included [...].

        Each chance is scaled by observed / expected so far. Where 10 drafts of 20 were expected to
        be accepted and 5 were, 0.6 becomes 0.3.
        """
        pairs = zip(self.observed, self.expected, strict=True)
        scales = np.array([seen / hoped if hoped > 0 else 0.0 for seen, hoped in pairs])
        # No depth is reached more often than the one before it, and none more often than always.
        reached = np.minimum(expected * scales, 1) * drafted
        return np.asarray(1 + np.minimum.accumulate(reached, axis=-1).sum(-1))

    def age(self) -> None:
        """Halve the weight of everything observed so far."""
        self.expected = [value / 2 for value in self.expected]
        self.observed = [value / 2 for value in self.observed]
