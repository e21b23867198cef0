"""How large a tree to draft at each step: the size that gives the most tokens per second, or none.

A tree of N nodes is worth its time when the tokens that it is expected to bring outweigh the longer
pass. Both are beliefs that every step corrects: seconds in `StepCosts`, tokens in
`Expectations`, which begin with the acceptance that was measured when the drafter was trained.
Nothing is timed before decoding.

A drafter may know that a proposal is better than others before it makes it: lookup that has found
the last six tokens again guesses more than lookup that has found two. Steps of one such outlook
have expectations of their own, and so their own size.

A draft that grows level by level may stop early, where one more level is likely to bring less than
its time is worth; the planner says how much that is. Such a size stands for those at which its
drafts end: it takes their time on average, and each step teaches what the size takes that it had.

Steps are made in runs of one size. Most runs have the size that is best by what is known. Some are
trials of another one: a size that may be better, or, while plain decoding is best, any draft, since
only drafts show what is accepted. Two accounts bound what wrong beliefs can cost; each receives 1 %
of all time. One pays for what drafts have lost against plain decoding (a conservative bandit, Wu et
al., 2016, arXiv 1602.04282), the other for what trials have lost against the best size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.acceptance_tracker import Expectations
from drafthead.infer.engine.draft_lengths import Stops, at_its_end
from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS, PlannerSettings
from drafthead.infer.engine.step_costs import Size, StepCosts, Table

Marks = NDArray[np.bool_]
# Of an outlook, how likely a draft within each budget is accepted to depth 1, 2, ...
Chances = Callable[[int], Mapping[Budget, Sequence[float]]]


class Planner(ABC):
    """Chooses the budget of each step of one decoding and learns from the step's result."""

    @abstractmethod
    def choose(self, outlook: int) -> Budget | None:
        """The budget of the next step, see `DraftSession.outlook`; None for one without a draft."""

    @abstractmethod
    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record a step: what was drafted (one of the stops of the chosen budget), the tokens
        committed in each active row, its time.
        """

    def finish(self) -> None:  # noqa: B027  (nothing to do is a good default)
        """Called after the last step."""


class FixedPlan(Planner):
    """The same budget at every step, or none."""

    def __init__(self, budget: Budget | None):
        self.budget = budget

    def choose(self, outlook: int) -> Budget | None:
        """Always the budget it was made with."""
        return self.budget

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""


@dataclass
class Run:
    """Several steps of one size and one outlook in one decoding, and what came of them."""

    outlook: int
    size: Size
    is_trial: bool  # another size is believed to be better
    continued: bool  # the run of this outlook before was of the same size
    made: list[Size] = field(default_factory=list)  # of each step: `size`, or where it stopped
    seconds: list[float] = field(default_factory=list)  # of each step
    accept_lengths: list[Sequence[int]] = field(default_factory=list)  # of each step, by row

    @property
    def tokens(self) -> float:
        """What the steps brought a row, on average over rows."""
        return sum(fmean(lengths) for lengths in self.accept_lengths if lengths)


class AdaptivePlan:
    """The smallest size, or none, that promises nearly as many tokens per second as the best.

    Nearly: no larger one promises more than `required_gain` times as many. Decodings of several
    threads share a plan, because what one of them learns serves the others; each has its own runs.
    """

    def __init__(
        self,
        costs: StepCosts,
        chances: Chances,
        stops: Stops = at_its_end,
        settings: PlannerSettings = DEFAULT_SETTINGS,
    ):
        """`chances` are what is known before decoding. `costs` may be shared with other plans."""
        self.costs, self.chances, self.stops, self.settings = costs, chances, stops, settings
        self.sizes = costs.sizes
        self.expectations: dict[int, Expectations] = {}  # by outlook
        # Plain steps that may still be lost: by drafts against plain decoding, and by trials
        # against the best size.
        self.draft_account = self.trial_account = settings.first_loss

    def best(self, outlook: int = NO_OUTLOOK) -> Size:
        """The smallest size that promises nearly as many tokens per second as the best."""
        with self.costs.lock:
            return self.sizes[self._smallest_good(self.log_rates(outlook))]

    def expected(self, outlook: int) -> Expectations:
        """What steps of an outlook are expected to bring."""
        if outlook not in self.expectations:
            chances = self.chances(outlook)
            self.expectations[outlook] = Expectations(
                self.sizes, chances, self.stops, self.settings
            )
        return self.expectations[outlook]

    def tokens(self, size: Size, outlook: int = NO_OUTLOOK) -> float:
        """Tokens that a step is expected to bring a row."""
        return float(self.expected(outlook).tokens()[self.costs.places[size]])

    def seconds(self, size: Size, outlook: int = NO_OUTLOOK) -> float:
        """Seconds that a step is expected to take."""
        return math.exp(self.log_seconds(outlook)[self.costs.places[size]])

    def rate(self, size: Size, outlook: int = NO_OUTLOOK) -> float:
        """Expected tokens per second of a row."""
        return self.tokens(size, outlook) / self.seconds(size, outlook)

    def log_seconds(self, outlook: int) -> Table:
        """Logarithm of the expected seconds of a step of each size [S], wherever it stops."""
        lengths = self.expected(outlook).lengths
        return np.asarray(np.log(lengths.seconds(np.exp(self.costs.log_seconds))))

    def log_rates(self, outlook: int) -> Table:
        """Logarithm of the expected tokens per second of a row, for each size [S]."""
        return np.asarray(np.log(self.expected(outlook).tokens()) - self.log_seconds(outlook))

    def priced(self, size: Size, outlook: int) -> Size:
        """A size with its `least_chance`: the tokens that the time of one more level brings in
        steps of the best size.
        """
        if size is None or len(stops := self.stops(size)) == 1:
            return size
        seconds = [self.costs.seconds(stop) for stop in (stops[0], stops[-1])]
        level = max(0.0, seconds[1] - seconds[0]) / (len(stops) - 1)
        return replace(size, least_chance=level * self.rate(self.best(outlook), outlook))

    def next_run(self, outlook: int, last: Run | None) -> Run:
        """What to do at an outlook after a run of it in the same decoding, if there was one."""
        with self.costs.lock:
            # What drafts are compared with comes first where nothing is known.
            size, is_trial = (None, False) if self.costs.is_guess else self._choice(outlook)
            continued = last is not None and last.size == size
            return Run(outlook, self.priced(size, outlook), is_trial, continued)

    def record(self, run: Run) -> None:
        """Learn from a run, which the end of an answer may have cut short."""
        with self.costs.lock:
            for made, lengths in zip(run.made, run.accept_lengths, strict=True):
                if run.size is not None and made is not None:
                    self.expected(run.outlook).add(run.size, made, lengths)
            first = 0 if run.continued else self.settings.settling_steps
            settled: dict[Size, list[float]] = {}
            for made, seconds in zip(run.made[first:], run.seconds[first:], strict=True):
                settled.setdefault(made, []).append(seconds)
            for made, several in settled.items():
                self.costs.add(made, several, run.continued)
            self._settle_accounts(run)

    def _choice(self, outlook: int) -> tuple[Size, bool]:
        """The best size that can be paid for, or one that is worth a trial, and whether it is."""
        settings, rates = self.settings, self.log_rates(outlook)
        expected, log_seconds = self.expected(outlook), self.log_seconds(outlook)
        ratios = np.exp(log_seconds - log_seconds[0])  # to a plain step
        dearest = ratios * np.exp(settings.caution * self.costs.deviations_from(None))
        # A run loses as much if its steps are that dear and half as much is accepted.
        brings = (1 + expected.tokens()) / 2
        can_be_paid = settings.run_steps * (dearest - brings) <= self.draft_account
        can_be_paid[0] = True
        best = self._smallest_good(np.where(can_be_paid, rates, -math.inf))
        lost = np.maximum(1 - np.exp(rates - rates[best]), settings.least_loss)
        can_be_paid &= settings.run_steps * ratios * lost <= self.trial_account
        can_be_paid[best] = False
        can_be_paid &= ~expected.hopeless
        tried = self._worth_a_trial(expected, rates, best, can_be_paid)
        return self.sizes[best if tried is None else tried], tried is not None

    def _worth_a_trial(
        self, expected: Expectations, rates: Table, best: int, can_be_paid: Marks
    ) -> int | None:
        """The place of a size that may well be better than the best; None if there is none."""
        settings = self.settings
        hoped = rates + settings.optimism * self.costs.lessons(self.sizes[best])
        worth = can_be_paid
        if best > 0:  # while plain decoding is best, any draft is of interest
            if can_be_paid[0] and self.trial_account >= settings.most_for_trials:
                return 0  # nothing was tried for long, and drafts may have become dear unnoticed
            worth = worth & (hoped > rates[best] + math.log(settings.required_gain))
        if not worth.any():
            return None
        if best == 0:
            # Acceptance may have changed since the last draft: what is old must not outvote it.
            expected.age()
        return int(np.argmax(np.where(worth, hoped, -math.inf)))

    def _smallest_good(self, log_rates: Table) -> int:
        """The place of the smallest size that promises nearly as much as the best."""
        return int(np.argmax(log_rates >= log_rates.max() - math.log(self.settings.required_gain)))

    def _settle_accounts(self, run: Run) -> None:
        """Add a share of the run's time, and subtract what the run has lost.

        Its time is what such steps are believed to take now: steps that have compiled a graph, or
        that something else on the machine has held up, are no loss of the draft's.
        """
        settings, plain = self.settings, self.costs.seconds(None)
        seconds = sum(map(self.costs.seconds, run.made))
        added = settings.loss_share * seconds / plain
        drafts, trials = self.draft_account + added, self.trial_account + added
        if run.size is not None:
            drafts += run.tokens - seconds / plain
        if run.is_trial:
            lost = seconds - run.tokens / self.rate(self.best(run.outlook), run.outlook)
            trials -= max(lost, settings.least_loss * seconds) / plain
        least = -settings.first_loss  # what is lost beyond that is forgiven, or drafts never return
        self.draft_account = max(least, min(drafts, settings.most_for_drafts))
        self.trial_account = max(least, min(trials, settings.most_for_trials))


class PlannedDecoding(Planner):
    """One decoding under a plan that it shares with others."""

    def __init__(self, plan: AdaptivePlan, on_finish: Callable[[], object] = lambda: None):
        """`on_finish` is called after the last step."""
        self.plan, self.on_finish = plan, on_finish
        self.runs: dict[int, Run] = {}  # the current one of each outlook
        self.outlook = NO_OUTLOOK  # of the current step

    def choose(self, outlook: int) -> Budget | None:
        """The size of the current run of this outlook."""
        if outlook not in self.runs:
            self.runs[outlook] = self.plan.next_run(outlook, None)
        self.outlook = outlook
        return self.runs[outlook].size

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record a step; after the last one of a run the plan chooses again."""
        run = self.runs[self.outlook]
        run.made.append(budget)
        run.seconds.append(seconds)
        run.accept_lengths.append(accept_lengths)
        if len(run.seconds) == self.plan.settings.run_steps:
            self.plan.record(run)
            self.runs[run.outlook] = self.plan.next_run(run.outlook, run)

    def finish(self) -> None:
        """Learn from the runs that the end has cut short."""
        for run in self.runs.values():
            if run.seconds:
                self.plan.record(run)
        self.on_finish()
