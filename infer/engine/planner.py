"""How large a tree to draft at each step: the size that gives the most tokens per second, or none.

A tree of N nodes is worth its time when the tokens that it is expected to bring outweigh the longer
pass. Seconds come from timing real steps on this machine (`infer.timing`), tokens from the
acceptance that was measured when the drafter was trained. Both are corrected while decoding, for
which `AdaptivePlan` sometimes takes steps that are not the best by its estimates:

    from                 when                            to     for (PlannerSettings)
    DRAFT, PROBE         a draft is best, a glance due   GLANCE glance_steps
    DRAFT, PROBE         a draft is best                 DRAFT  steps_per_choice
    GLANCE, PLAIN        a draft is best                 DRAFT  steps_per_choice
    DRAFT, PROBE, GLANCE plain decoding is best          PLAIN  first_probe, then twice as many ...
    PLAIN, its steps done plain decoding is best         PROBE  probe_steps

A glance is due after `first_glance` drafted steps, then twice as many, ... up to `longest_wait`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from threading import Lock

from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.acceptance_tracker import AcceptanceTracker
from drafthead.infer.engine.pace_tracker import PaceTracker
from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS, PlannerSettings


class Planner(ABC):
    """Chooses the budget of each step and learns from the step's result."""

    @abstractmethod
    def choose(self) -> Budget | None:
        """The budget of the next step; None for a step without a draft."""

    @abstractmethod
    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record a step: its budget, the tokens committed in each active row, its time."""


class FixedPlan(Planner):
    """The same budget at every step, or none."""

    def __init__(self, budget: Budget | None):
        self.budget = budget

    def choose(self) -> Budget | None:
        """Always the budget it was made with."""
        return self.budget

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""


class Mode(Enum):
    """What the current steps are for."""

    DRAFT = "drafts, because they are best"
    GLANCE = "a few plain steps among drafted ones, to see how long these take now"
    PLAIN = "no drafts, because plain decoding is best"
    PROBE = "a few drafted steps among plain ones, to see whether more is accepted now"


def next_mode(mode: Mode, draft_is_best: bool, glance_due: bool) -> Mode:
    """The transition table of the module's docstring."""
    if not draft_is_best:
        return Mode.PROBE if mode is Mode.PLAIN else Mode.PLAIN
    was_drafting = mode in (Mode.DRAFT, Mode.PROBE)
    return Mode.GLANCE if was_drafting and glance_due else Mode.DRAFT


class AdaptivePlan(Planner):
    """The smallest budget, or none, that promises nearly as many tokens per second as the best.

    Nearly: no larger one promises more than `required_gain` times as many. Decodings of several
    threads share a plan, because what one of them learns serves the others. A step that one thread
    chose before another changed the mode counts as a step of the new mode: that makes estimates
    less sure, and never changes an answer.
    """

    def __init__(
        self,
        seconds: Mapping[Budget | None, float],
        chances: Mapping[Budget, Sequence[float]],
        settings: PlannerSettings = DEFAULT_SETTINGS,
    ):
        """`seconds` of a step for each budget, and for None those of a plain step.

        `chances[budget][d]` is the probability, as far as known before decoding, that a draft
        within the budget is accepted to depth d + 1.
        """
        self.seconds, self.chances, self.settings = seconds, chances, settings
        self.sizes: list[Budget | None] = [None, *sorted(chances)]  # from small to large
        self.acceptance = AcceptanceTracker(max(chances.values(), key=len), settings)
        self.pace = PaceTracker(settings)
        self.current: Budget | None = self._best()
        self.mode = Mode.PLAIN if self.current is None else Mode.DRAFT
        # Even a plain start is short: the first probe comes soon, before much time is lost.
        self.steps_left = settings.steps_per_choice
        self.next_plain_steps = settings.first_probe  # of the next spell in PLAIN
        self.glance_wait = settings.first_glance  # drafted steps from the last glance to the next
        self.drafts_until_glance = self.glance_wait
        self.learning = Lock()

    def choose(self) -> Budget | None:
        """The current choice."""
        return self.current

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record a step; when the current mode's steps are done, choose again."""
        with self.learning:
            self.pace.add(budget is not None, seconds / self.seconds[budget])
            if budget is not None:
                self.acceptance.add(self.chances[budget], accept_lengths)
                self.drafts_until_glance -= 1
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
        enough = max(rates.values()) / self.settings.required_gain
        return next(budget for budget, rate in rates.items() if rate >= enough)

    def _replan(self) -> None:
        """Enter the next mode: set its budget, its number of steps and the waits after it."""
        settings, best = self.settings, self._best()
        self.mode = next_mode(self.mode, best is not None, self.drafts_until_glance <= 0)
        self.current, self.steps_left = best, settings.steps_per_choice
        if best is not None:
            self.next_plain_steps = settings.first_probe
        if self.mode is Mode.GLANCE:
            self.current, self.steps_left = None, settings.glance_steps
            self.glance_wait = min(2 * self.glance_wait, settings.longest_wait)
            self.drafts_until_glance = self.glance_wait
        elif self.mode is Mode.PLAIN:
            self.steps_left = self.next_plain_steps
            self.next_plain_steps = min(2 * self.next_plain_steps, settings.longest_wait)
        elif self.mode is Mode.PROBE:
            # Acceptance may have changed since the last draft: what is old must not outvote it.
            self.acceptance.age()
            self.current = max(self.chances, key=self.rate)
            self.steps_left = settings.probe_steps
