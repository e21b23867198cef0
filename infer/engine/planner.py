"""How large a tree to draft at each step: what gives the most tokens per second, or none.

A tree of N nodes is worth its time when the tokens that it is expected to bring outweigh the longer
pass. Seconds come from timing real steps on this machine (`infer.step_timing`), tokens from the
acceptance that the drafter measured when it was trained. Both are corrected by what is seen while
decoding.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from statistics import mean, median

from drafthead.heads.trees.tree import Budget

# Steps between two looks at the numbers; a choice is not worth its own time at every step.
STEPS_A_CHOICE = 4
# A larger tree must promise so much more than a smaller one, and any tree than plain decoding: the
# best of many estimates is seldom as good as it looks, and wide passes suffer most when a machine
# becomes busy.
WORTHWHILE = 1.03
# Steps whose acceptance is remembered, by exponential forgetting.
MEMORY = 128
# The measured acceptance of training counts for as many steps as this.
PRIOR_STEPS = 32
# After plain decoding was chosen a few steps are drafted all the same, to see whether that has
# changed: first after so many plain steps, then after twice as many each time, up to the last.
FIRST_PROBE, LAST_PROBE = 96, 384
PROBE_STEPS = 4
# While drafts are chosen a few steps are plain, to see what these take now: first after so many,
# then after twice as many each time, up to the last probe's.
FIRST_GLANCE, GLANCE_STEPS = 16, 6
# The first steps of another kind find the processor's caches full of other things.
UNSETTLED = 2
# Steps on either side of a change of kind, and changes, from which the kinds are compared.
STEPS_COMPARED, CHANGES_COMPARED = 16, 8
# What was timed before decoding counts as much as so many changes.
PRIOR_CHANGES = 4


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


class AcceptanceTracker:
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
    """How plain steps and drafted ones compare now, as against what was timed before.

    What else a machine does changes from second to second, and slows passes over several tokens,
    which compute, more than those over one, which wait for memory. So steps are compared right
    before and right behind a change from one kind to the other.
    """

    def __init__(self) -> None:
        self.found = [1.0] * PRIOR_CHANGES  # plain over drafted, of each change
        self.drafting = False  # the kind of the last step
        self.before: list[float] = []  # ratios to what was timed, of the other kind before it
        self.now: list[float] = []  # and of this kind since
        self.steps = 0  # of this kind on end

    def add(self, drafted: bool, ratio: float) -> None:
        """Take in a step that took `ratio` times as long as was timed."""
        if drafted != self.drafting:
            self.found = self._with_this_change()[-CHANGES_COMPARED:]
            self.before, self.now = self.now[-STEPS_COMPARED:], []
            self.drafting, self.steps = drafted, 0
        self.steps += 1
        if self.steps > UNSETTLED:
            self.now.append(ratio)

    @property
    def plain_over_drafted(self) -> float:
        """By what to multiply the timed seconds of plain steps to compare them with drafted ones.

        Drafted steps at 1.2, 1.3 and 1.2 of what was timed and then plain ones at 0.9 and 0.9 make
        0.75; with four times the 1 of the beginning the mean is 0.95.
        """
        return mean(self._with_this_change()[-CHANGES_COMPARED:])

    def _with_this_change(self) -> list[float]:
        """What was found, and what is known of the last change."""
        if not self.before or not self.now:
            return self.found
        change = median(self.now[:STEPS_COMPARED]) / median(self.before)
        return [*self.found, 1 / change if self.drafting else change]


class AdaptivePlan(Planner):
    """The smallest budget, or none, that promises nearly as many tokens per second as the best.

    Nearly: no larger one promises more than `WORTHWHILE` times as many.
    """

    def __init__(
        self,
        seconds: Mapping[Budget | None, float],
        chances: Mapping[Budget, Sequence[float]],
    ):
        """`seconds` a step for each budget, and None for a plain one; `chances[budget][d]` is how
        likely a draft within the budget is accepted to depth d + 1, as far as is known before.
        """
        self.seconds, self.chances = seconds, chances
        self.sizes: list[Budget | None] = [None, *sorted(chances)]  # from small to large
        self.acceptance = AcceptanceTracker(max(chances.values(), key=len))
        self.pace = Pace()
        self.current: Budget | None = self._best()
        self.steps_left = STEPS_A_CHOICE
        self.probe_after = FIRST_PROBE
        self.glance_after = self.until_glance = FIRST_GLANCE
        self.glancing = False  # whether the current steps are plain only to see what they take

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
        if budget is None:
            return 1 / (self.seconds[None] * self.pace.plain_over_drafted)
        return self.acceptance.tokens(self.chances[budget]) / self.seconds[budget]

    def _best(self) -> Budget | None:
        rates = {budget: self.rate(budget) for budget in self.sizes}
        enough = max(rates.values()) / WORTHWHILE
        return next(budget for budget, rate in rates.items() if rate >= enough)

    def _replan(self) -> None:
        best, was_plain, glanced = self._best(), self.current is None, self.glancing
        self.current, self.steps_left, self.glancing = best, STEPS_A_CHOICE, False
        if best is not None:
            self.probe_after = FIRST_PROBE
            if not was_plain and self.until_glance <= 0:
                self.current, self.steps_left, self.glancing = None, GLANCE_STEPS, True
                self.glance_after = min(2 * self.glance_after, LAST_PROBE)
                self.until_glance = self.glance_after
        elif was_plain and not glanced:  # for long enough: look again, with an open mind
            self.acceptance.age()
            self.current, self.steps_left = max(self.chances, key=self.rate), PROBE_STEPS
        else:  # plain from now on, or again after a probe
            self.steps_left = self.probe_after
            self.probe_after = min(2 * self.probe_after, LAST_PROBE)
