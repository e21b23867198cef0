"""How far drafts go that may stop early, and what steps of each size then take and bring.

Sizes that differ in nothing but the most levels that a draft may have share their beginning: where
a draft of at most two levels stops, one of at most four stops as well.
"""

from collections.abc import Callable, Sequence

import numpy as np

from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS, PlannerSettings
from drafthead.infer.engine.step_costs import Size, Table

# The sizes at which a draft within a budget may end, see `Drafter.stops`.
Stops = Callable[[Budget], Sequence[Budget]]


def at_its_end(budget: Budget) -> tuple[Budget, ...]:
    """The stops of drafts that always use their whole budget."""
    return (budget,)


class DraftLengths:
    """How far drafts of each kind go, as drafts teach it; at first they go as far as they may."""

    def __init__(
        self,
        sizes: Sequence[Size],
        stops: Stops = at_its_end,
        settings: PlannerSettings = DEFAULT_SETTINGS,
    ):
        """For S sizes, of which all stops are some."""
        self.stops, self.num_sizes = stops, len(sizes)
        numbers = {size: place for place, size in enumerate(sizes)}
        ladders = {stops(size)[0]: stops(size) for size in sorted(filter(None, sizes))}
        # By the size of one level: the places of the sizes of 1, 2, ... levels.
        self.places = {
            first: np.array([numbers[stop] for stop in ladder])
            for first, ladder in ladders.items()
            if len(ladder) > 1
        }
        self.trackers = {
            first: LengthTracker(len(places), settings) for first, places in self.places.items()
        }

    def add(self, budget: Budget, made: Budget) -> None:
        """Record one step: what a draft might have been, and which of its stops it became."""
        stops = self.stops(budget)
        if len(stops) > 1:
            self.trackers[stops[0]].add(stops.index(made) + 1, len(stops))

    def seconds(self, seconds: Table) -> Table:
        """What steps of each size take on average [S], by the seconds [S] of whole drafts.

        If drafts of 1, 2 and 3 levels take 1.2, 1.3 and 1.4 seconds, and half of them go on after
        the first level and all after the second, the three sizes take 1.2, 1.25 and 1.3.
        """
        found = seconds.copy()
        for first, places in self.places.items():
            of_each_level = np.diff(seconds[places], prepend=0)
            found[places] = np.cumsum(self.trackers[first].going * of_each_level)
        return found

    def drafted(self, depths: int) -> Table:
        """How often drafts of each size have depth 1, 2, ... [S, depths].

        What is deeper than a size has levels, as paths of lookup are, is there where the last is.
        """
        found = np.ones((self.num_sizes, depths))
        for first, places in self.places.items():
            last = np.arange(len(places))[:, None]
            found[places] = self.trackers[first].going[np.minimum(np.arange(depths), last)]
        return found


class LengthTracker:
    """How often drafts went on after each level, where they might.

    Old steps are forgotten exponentially. At first it holds `prior_steps` steps that went on.
    """

    def __init__(self, levels: int, settings: PlannerSettings = DEFAULT_SETTINGS):
        """`levels` is the most that a draft may have."""
        self.keep = 1 - 1 / settings.acceptance_memory
        self.tried = [float(settings.prior_steps)] * levels  # drafts that might have level 1, 2, ..
        self.had = list(self.tried)

    @property
    def going(self) -> Table:
        """The probability that a draft has level 1, 2, ... [levels], if it may have them all."""
        return np.cumprod(np.array(self.had) / np.array(self.tried), dtype=np.float64)

    def add(self, made: int, most: int) -> None:
        """Record a draft of `made` levels that might have had `most`.

        What ended with its second level because it might have no more says nothing of the third.
        """
        for level in range(1, min(made + 1, most)):
            self.tried[level] = self.keep * self.tried[level] + 1
            self.had[level] = self.keep * self.had[level] + (level < made)
