"""How large a tree to draft at each step: the one that gives the most tokens per second, or none.

A tree of N nodes is worth its time when the tokens that it is expected to bring outweigh the longer
pass. Seconds come from timing real steps on this machine (`infer.step_costs`), tokens from the
acceptance that the drafter measured when it was trained. Both are corrected by what is seen while
decoding.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from drafthead.heads.tree import Budget

# Steps between two looks at the numbers; a choice is not worth its own time at every step.
STEPS_A_CHOICE = 4
# Steps whose acceptance is remembered, by exponential forgetting.
MEMORY = 128
# The measured acceptance of training counts for as many steps as this.
PRIOR_STEPS = 32
# After plain decoding was chosen a few steps are drafted all the same, to see whether that has
# changed: first after so many plain steps, then after twice as many each time, up to the last.
FIRST_PROBE, LAST_PROBE = 64, 512
PROBE_STEPS = 4
# While drafts are chosen a few steps are plain, to see what these take now.
FIRST_GLANCE, GLANCE_STEPS = 16, 2
# A step that takes so many times as long as was timed says nothing of the next: the process slept.
OUTLIER = 4.0
# What was timed before counts for as many steps as this, beside those that are seen.
TIMED_BEFORE = 4


class Planner(ABC):
    """Chooses the budget of each step and is told what came of it."""

    @abstractmethod
    def choose(self) -> Budget | None:
        """The budget of the next step; None for a step without a draft."""

    @abstractmethod
    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Take in a step: its budget, the tokens that it committed in each active row, its time."""


class FixedPlan(Planner):
    """The same budget at every step, or none."""

    def __init__(self, budget: Budget | None):
        self.budget = budget

    def choose(self) -> Budget | None:
        """Always the budget it was made with."""
        return self.budget

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""


class Acceptance:
    """How much deeper or less deep drafts are accepted than was expected, depth by depth.

    For each depth it adds up how many drafts were expected to get there and how many did. Old steps
    are forgotten exponentially, and at first there are `PRIOR_STEPS` steps that went as expected.
    """

    def __init__(self, chances: Sequence[float]):
        """`chances[d]`: how likely a large draft is accepted to depth d + 1."""
        self.expected = [PRIOR_STEPS * chance for chance in chances]
        self.observed = list(self.expected)

    def add(self, expected: Sequence[float], accept_lengths: Sequence[int]) -> None:
        """Take in one step: the chance that was given to each depth, and what was accepted.

        An accept length counts the root, so 3 means that depths 1 and 2 were reached.
        """
        keep = 1 - 1 / MEMORY
        rows = max(1, len(accept_lengths))
        for depth, chance in enumerate(expected):
            reached = sum(length > depth + 1 for length in accept_lengths) / rows
            self.expected[depth] = keep * self.expected[depth] + chance
            self.observed[depth] = keep * self.observed[depth] + reached

    def tokens(self, expected: Sequence[float]) -> float:
        """Tokens that a step commits, the bonus included, given the chance of each depth.

        Each chance is scaled by observed / expected so far. Where 10 drafts of 20 were expected to
        be accepted and 5 were, a chance of 0.6 becomes 0.3.
        """
        total, reachable = 1.0, 1.0
        for depth, chance in enumerate(expected):
            if self.expected[depth] > 0:
                # No depth is reached more often than the one before it.
                chance = chance * self.observed[depth] / self.expected[depth]
                reachable = min(reachable, chance)
                total += reachable
        return total

    def age(self) -> None:
        """Give what was seen long ago half its weight."""
        self.expected = [value / 2 for value in self.expected]
        self.observed = [value / 2 for value in self.observed]


class Pace:
    """How many times as long steps take as was timed before: plain ones, and those with drafts.

    What else a machine does slows passes over several tokens, which compute, more than those over
    one, which wait for memory. Where little was seen of one kind, both are taken to be slowed
    alike.
    """

    def __init__(self) -> None:
        self.sums = {False: 0.0, True: 0.0}  # of ratios, by whether a step had a draft
        self.counts = {False: 0.0, True: 0.0}

    def add(self, drafted: bool, ratio: float) -> None:
        """Take in a step that took `ratio` times as long as was timed."""
        if ratio > OUTLIER:
            return
        for kind in (False, True):
            self.sums[kind] *= 1 - 1 / MEMORY
            self.counts[kind] *= 1 - 1 / MEMORY
        self.sums[drafted] += ratio
        self.counts[drafted] += 1

    def of(self, drafted: bool) -> float:
        """The ratio for a kind of step.

        After 16 drafted steps at 1.25, drafted ones are expected at (1.2 x 4 + 20) / 20 = 1.24 and
        plain ones, of which nothing was seen, at 1.2.
        """
        both = sum(self.sums.values()) + TIMED_BEFORE
        alike = both / (sum(self.counts.values()) + TIMED_BEFORE)
        return (alike * TIMED_BEFORE + self.sums[drafted]) / (TIMED_BEFORE + self.counts[drafted])


class AdaptivePlan(Planner):
    """The budget with the most expected tokens per second, or none when plain decoding has more."""

    def __init__(
        self,
        seconds: Mapping[Budget | None, float],
        chances: Mapping[Budget, Sequence[float]],
    ):
        """`seconds` a step for each budget, and None for a plain one; `chances[budget][d]` is how
        likely a draft within the budget is accepted to depth d + 1, as far as is known before.
        """
        self.seconds, self.chances = seconds, chances
        self.acceptance = Acceptance(max(chances.values(), key=len))
        self.pace = Pace()
        self.current: Budget | None = self._best()
        self.steps_left = STEPS_A_CHOICE
        self.probe_after = FIRST_PROBE
        self.glance_after = self.until_glance = FIRST_GLANCE

    def begin(self) -> None:
        """Another text begins, which may suit the drafter better or worse than the last."""
        self.probe_after = FIRST_PROBE
        self.steps_left = min(self.steps_left, FIRST_PROBE)

    def choose(self) -> Budget | None:
        """The current choice."""
        return self.current

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Take in a step; every few steps choose anew."""
        self.pace.add(budget is not None, seconds / self.seconds[budget])
        if budget is not None:
            self.acceptance.add(self.chances[budget], accept_lengths)
            self.until_glance -= 1
        self.steps_left -= 1
        if self.steps_left <= 0:
            self._replan()

    def rate(self, budget: Budget | None) -> float:
        """Expected tokens per second of a row."""
        seconds = self.seconds[budget] * self.pace.of(budget is not None)
        if budget is None:
            return 1 / seconds
        return self.acceptance.tokens(self.chances[budget]) / seconds

    def _best(self) -> Budget | None:
        return max((None, *self.chances), key=self.rate)

    def _replan(self) -> None:
        best = self._best()
        if best is not None and self.current is not None and self.until_glance <= 0:
            self.current, self.steps_left = None, GLANCE_STEPS
            self.glance_after = min(2 * self.glance_after, LAST_PROBE)
            self.until_glance = self.glance_after
        elif best is not None:
            self.current, self.steps_left, self.probe_after = best, STEPS_A_CHOICE, FIRST_PROBE
        elif self.current is None:  # plain for long enough: look again, with an open mind
            self.acceptance.age()
            self.current = max(self.chances, key=self.rate)
            self.steps_left = PROBE_STEPS
        else:  # plain from now on, or again after a probe
            self.current, self.steps_left = None, self.probe_after
            self.probe_after = min(2 * self.probe_after, LAST_PROBE)
