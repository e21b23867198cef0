"""Drafts that pay: how large a tree to ask for at each step, and what of a free one to keep.

A tree of N nodes is worth its time when the tokens that it is expected to bring outweigh the longer
pass. Both are beliefs that every step corrects: `StepCosts` of time, `DraftAcceptance` of tokens,
which begins with what was measured when the drafter was trained. Nothing is timed before decoding.

Free drafts, such as those of lookup, come first. They cost no pass, so the plan sees them, with the
score of each node, before it decides: the best nodes are kept that pay for their share of the pass,
or none, by a curve of what scores come true at.

Drafts that cost passes are asked for by size. A draft that grows level by level may stop early,
where one more level is likely to bring less than its time is worth; the plan says how much that is.
Their sizes come in runs. Most runs have the size that is best by what is known. Some are trials of
another one: a size that may be better, or, while plain decoding is best, any draft, since only
drafts show what is accepted. Two accounts bound what wrong beliefs can cost; each receives 1 % of
all time. One pays for what drafts have lost against plain decoding (a conservative bandit, Wu et
al., 2016, arXiv 1602.04282), the other for what trials have lost against the best size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean
from typing import Self

import numpy as np
from numpy.typing import NDArray

from drafthead.core.sampling import RowSampling
from drafthead.core.trees.guesses import Guesses, Proposal
from drafthead.core.trees.tree import Budget, Free, free_budget
from drafthead.infer.planning.draft_acceptance import (
    Calibration,
    DraftAcceptance,
    Size,
    Table,
    Weighed,
)
from drafthead.infer.planning.step_costs import StepCosts

Marks = NDArray[np.bool_]
Propose = Callable[[Budget], Proposal]  # what the drafter makes within a budget
# What may draft for the rows of a batch (None: all that there is), and for how many eighths of
# them. Nothing where all may for every row.
Mix = frozenset[tuple[frozenset[str] | None, int]]
EVERYTHING: Mix = frozenset()

# Rows by which free drafts of a batch are judged, because each takes time.
JUDGED_ROWS = 8
# Nodes of the free draft that is asked for, at first and at least: twice as many where all of them
# have paid, and half as many where none has for so many steps. To find them takes time.
FIRST_FREE_NODES, FEWEST_FREE_NODES, UNUSED_STEPS = 16, 8, 16
HOPELESS = 0.8  # of the best size's promised tokens a second: larger sizes are not looked at


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of an `AdaptivePlan`: how often it decides, what it demands, tries and remembers."""

    # Steps of a run: all of one size, then the plan chooses again. Choosing costs time, so not at
    # every step.
    run_steps: int = 4
    # Steps at the beginning of a run of another size than the last that are not timed: they find
    # the CPU caches full of the other size's data, and may record a pass.
    settling_steps: int = 2
    # Ratio of tokens per second that a larger tree must promise over a smaller one, and any tree
    # over plain decoding. The best of many estimates is seldom as good as it looks, and wide passes
    # suffer most when the machine becomes busy.
    required_gain: float = 1.03
    # Share of all time that drafts may lose against plain decoding, and likewise trials against the
    # best size.
    loss_share: float = 0.01
    # The same in plain steps: at first, and the most that is saved up. An always wrong drafter
    # loses no more than 8 + 5 of the first 512 steps, or 3 %; a good one does not run out of it by
    # chance.
    first_loss: float = 8.0
    most_for_drafts: float = 24.0
    most_for_trials: float = 9.0
    # A trial counts as losing at least this share of its time, whatever it brought: changing the
    # size costs a little that is not timed.
    least_loss: float = 0.1
    # Standard deviations by which a size may be cheaper than believed when a trial is considered,
    # and dearer when it must be paid for.
    optimism: float = 1.0
    caution: float = 2.0

    def for_rows(self, rows: int) -> Self:
        """The settings for a batch: a step that is lost is lost in every row.

        So less may be lost at first: a quarter of the steps, which are four times the tokens, with
        16 rows. Answers of a batch often end before the accounts would have filled again.
        """
        return replace(self, first_loss=self.first_loss / math.sqrt(rows))


DEFAULT_SETTINGS = PlannerSettings()


class Planner(ABC):
    """Chooses what each step of one decoding verifies, and learns from the step's result."""

    @abstractmethod
    def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
        """The proposal for the next step, made by `propose`; None for a step without a draft.

        `ahead` where a step before it is not learnt from yet; see `knows_next`.
        """

    @abstractmethod
    def learn(self, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record the step that was drafted for: tokens committed in each active row, its time."""

    def meet(  # noqa: B027  (a plan may take them alike)
        self, rows: int, columns: int, sampling: RowSampling, mix: Mix = EVERYTHING
    ) -> None:
        """Told before each step that is drafted for: see the properties of `BatchRun`."""

    @property
    def knows_next(self) -> bool:
        """Whether what is drafted next does not depend on the step that is not learnt from yet."""
        return False

    def finish(self) -> None:  # noqa: B027  (nothing to do is a good default)
        """Called after the last step."""


class FixedPlan(Planner):
    """A draft of one budget at every step, or none."""

    def __init__(self, budget: Budget | None):
        self.budget = budget

    def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
        return None if self.budget is None else propose(self.budget)

    @property
    def knows_next(self) -> bool:
        return True

    def learn(self, accept_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""


NO_DRAFTS = FixedPlan(None)


@dataclass(frozen=True)
class Prices:
    """Costs, in plain steps, by which free drafts are weighed during a run."""

    free: Sequence[float]  # of a step of each free size, as far as known
    dearest: Sequence[float]  # the same, on the cautious side
    run: float  # of a step of the run's size
    reached: Sequence[float] | None  # how often the run's own drafts are accepted to each depth
    for_drafts: float  # that drafts may still lose
    for_trials: float  # that trials may still lose


@dataclass
class Run:
    """Several steps in one decoding for which drafts of one size are asked for, if of any."""

    size: Size
    is_trial: bool  # another size is believed to be better
    continued: bool  # the run before was of the same size
    prices: Prices | None  # None: free drafts are left out
    lost: float = 0.0  # plain steps that free drafts have taken more than they brought
    # Of each step: what was drafted (`size`, where its draft stopped, or a free size), whether that
    # was a trial, seconds, and what rows committed.
    made: list[Size] = field(default_factory=list)
    trials: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accept_lengths: list[Sequence[int]] = field(default_factory=list)


class AdaptivePlan:
    """The smallest size, or none, that promises nearly as many tokens per second as the best.

    Nearly: no larger one promises more than `required_gain` times as many. Decodings of several
    threads share a plan, because what one of them learns serves the others; each has its own runs.
    """

    def __init__(self, costs: StepCosts, settings: PlannerSettings = DEFAULT_SETTINGS):
        """For the sizes of `costs`, which may be shared with other plans."""
        self.costs, self.settings, self.sizes = costs, settings, costs.sizes
        self.acceptance = DraftAcceptance(self.sizes)
        self.free: list[Budget] = [size for size in self.sizes if isinstance(size, Free)]
        self.free_places = [costs.places[size] for size in self.free]
        # Sizes that runs may have; where all drafts are free, those that `best` compares.
        self.asked_for = np.array([not isinstance(size, Free) for size in self.sizes])
        self.compared = self.asked_for if self.asked_for.sum() > 1 else self.asked_for | True
        self.calibration = Calibration()  # of free drafts
        # Plain steps that may still be lost: by drafts against plain decoding, and by trials
        # against the best size.
        self.draft_account = self.trial_account = settings.first_loss

    def go_on_from(self, other: Self) -> None:
        """Begin with what drafts of the same decodings were found to bring, at other costs."""
        with other.costs.lock:
            self.acceptance, self.calibration = deepcopy((other.acceptance, other.calibration))
            self.draft_account, self.trial_account = other.draft_account, other.trial_account

    def best(self) -> Size:
        """The smallest size that promises nearly as many tokens per second as the best."""
        with self.costs.lock:
            # Free sizes are no choice beside others: `cut` weighs them at each step.
            rates = np.where(self.compared, self.log_rates(), -math.inf)
            return self.sizes[self._smallest_good(rates)]

    def tokens(self, size: Size) -> float:
        """Tokens that a step is expected to bring a row."""
        return float(self.acceptance.tokens()[self.costs.places[size]])

    def seconds(self, size: Size) -> float:
        """Seconds that a step is expected to take."""
        return math.exp(self.log_seconds()[self.costs.places[size]])

    def rate(self, size: Size) -> float:
        """Expected tokens per second of a row."""
        return self.tokens(size) / self.seconds(size)

    def log_seconds(self) -> Table:
        """Logarithm of the expected seconds of a step of each size [S], wherever it stops."""
        if not self.acceptance.ladders:
            return self.costs.log_seconds
        return np.asarray(np.log(self.acceptance.seconds(np.exp(self.costs.log_seconds))))

    def log_rates(self) -> Table:
        """Logarithm of the expected tokens per second of a row, for each size [S]."""
        return np.asarray(np.log(self.acceptance.tokens()) - self.log_seconds())

    def priced(self, size: Size) -> Size:
        """A size with its `least_chance`: the tokens that the time of one more level brings in
        steps of the best size.
        """
        if size is None or len(stops := self.acceptance.stops(size)) == 1:
            return size
        seconds = [self.costs.seconds(stop) for stop in (stops[0], stops[-1])]
        level = max(0.0, seconds[1] - seconds[0]) / (len(stops) - 1)
        return replace(size, least_chance=level * self.rate(self.best()))

    def cut(self, free: Guesses, run: Run, prices: Prices) -> tuple[Size, bool]:
        """The size of the best nodes of a free draft that pay, and whether that is a trial.

        None where they bring less than a step of the run's size, whose drafts get such nodes too.
        """
        settings, curve = self.settings, self.calibration
        rows = [Weighed(tree, curve) for tree in free.trees[:JUDGED_ROWS]]
        nodes, own = free.num_nodes, 1.0
        if run.size is not None and prices.reached is not None:
            merged = [Weighed(row.tree, curve, run.size.nodes - 1) for row in rows]
            own += sum(both(each.found, prices.reached) for each in merged) / len(rows)
        least = settings.required_gain * own / prices.run  # tokens in the time of a plain step
        for_drafts = prices.for_drafts - run.lost
        for_trials = min(prices.for_trials, for_drafts)
        best, kept, most, tried = 0.0, None, 0.0, None  # rates: as known, and as scores promise
        # From small to large, and the weighed trees grow along: nothing is added up twice.
        for size, cost, dearest in zip(self.free, prices.free, prices.dearest, strict=True):
            for row in rows:
                row.grow(size.nodes - 1)
            rate = (1 + sum(sum(row.found) for row in rows) / len(rows)) / cost
            hope = (1 + sum(sum(row.hoped) for row in rows) / len(rows)) / cost
            # The smallest that promises nearly as much as the best; nothing may be accepted.
            if rate >= max(least, settings.required_gain * best) and dearest - 1 <= for_drafts:
                best, kept = rate, size
            if hope >= max(least, most) and dearest - 1 <= for_trials:
                tried = size
            most = max(most, hope)
            if size.nodes >= nodes or hope < HOPELESS * most:
                break  # each further node promises less than those before
        if kept is not None or settings.least_loss > for_trials:
            return kept, False
        return tried, tried is not None

    def next_run(self, last: Run | None) -> Run:
        """The run after a run in the same decoding, if there was one."""
        with self.costs.lock:
            if self.costs.is_guess:  # what drafts are compared with comes first
                return Run(None, False, False, None)
            size, is_trial = self._choice()
            prices = None if is_trial or not self.free else self._prices(size)
            continued = last is not None and last.size == size
            return Run(self.priced(size), is_trial, continued, prices)

    def record(self, run: Run) -> None:
        """Learn from a run, which the end of an answer may have cut short."""
        with self.costs.lock:
            for made, lengths in zip(run.made, run.accept_lengths, strict=True):
                # Free drafts are judged by their scores, in `record_free`.
                if made is not None and not isinstance(made, Free):
                    self.acceptance.add(run.size, made, lengths)
            # After a change of size the processor's caches hold what the other size read.
            first = 0 if run.continued else self.settings.settling_steps
            # Drafts that stop early, and free ones, make steps of several sizes in one run.
            settled: dict[Size, list[float]] = {}
            for made, seconds in zip(run.made[first:], run.seconds[first:], strict=True):
                settled.setdefault(made, []).append(seconds)
            for made, several in settled.items():
                self.costs.add(made, several, run.continued and made == run.size)
            self._settle_accounts(run)

    def record_free(self, draft: Guesses, accept_lengths: Sequence[int]) -> None:
        """Learn what the scores of a free draft came true at."""
        if len(accept_lengths) != len(draft.trees):
            # Which lengths belong to which tree is then no longer known.
            return  # some rows have ended
        for tree, length in zip(draft.trees[:JUDGED_ROWS], accept_lengths, strict=False):
            if tree.tokens:
                whole = Weighed(tree, self.calibration, len(tree.tokens))
                self.calibration.add_depths(whole.guesses, length)

    def _prices(self, size: Size) -> Prices:
        """Costs by which free drafts are weighed beside drafts of a size."""
        log_seconds, place = self.log_seconds(), self.costs.places[size]
        ratios = np.exp(log_seconds - log_seconds[0])
        caution = np.exp(self.settings.caution * self.costs.deviations_from(None))
        return Prices(
            free=ratios[self.free_places].tolist(),
            dearest=(ratios * caution)[self.free_places].tolist(),
            run=float(ratios[place]),
            reached=None if size is None else self.acceptance.reached()[place].tolist(),
            for_drafts=self.draft_account,
            for_trials=self.trial_account,
        )

    def _choice(self) -> tuple[Size, bool]:
        """The best size that can be paid for, or one that is worth a trial, and whether it is."""
        if not self.asked_for[1:].any():
            return None, False
        settings, log_seconds = self.settings, self.log_seconds()
        tokens = self.acceptance.tokens()
        rates = np.log(tokens) - log_seconds
        ratios = np.exp(log_seconds - log_seconds[0])  # to a plain step
        dearest = ratios * np.exp(settings.caution * self.costs.deviations_from(None))
        # A run loses as much if its steps are that dear and half as much is accepted.
        can_be_paid = settings.run_steps * (dearest - (1 + tokens) / 2) <= self.draft_account
        can_be_paid[0] = True  # plain decoding, whatever was lost
        can_be_paid &= self.asked_for
        best = self._smallest_good(np.where(can_be_paid, rates, -math.inf))
        lost = np.maximum(1 - np.exp(rates - rates[best]), settings.least_loss)
        can_be_paid &= settings.run_steps * ratios * lost <= self.trial_account
        can_be_paid[best] = False
        tried = self._worth_a_trial(rates, best, can_be_paid)
        return self.sizes[best if tried is None else tried], tried is not None

    def _worth_a_trial(self, rates: Table, best: int, can_be_paid: Marks) -> int | None:
        """The place of a size that may well be better than the best; None if there is none."""
        settings = self.settings
        # A size of which nothing new would be learnt is no better for being uncertain.
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
            self.acceptance.age()
        return int(np.argmax(np.where(worth, hoped, -math.inf)))

    def _smallest_good(self, log_rates: Table) -> int:
        """The place of the smallest size that promises nearly as much as the best."""
        return int(np.argmax(log_rates >= log_rates.max() - math.log(self.settings.required_gain)))

    def _settle_accounts(self, run: Run) -> None:
        """Add a share of the run's time, and subtract what the run has lost.

        Its time is what such steps are believed to take now: steps that have recorded a pass, or
        that something else on the machine has held up, are no loss of the draft's.
        """
        settings, took = self.settings, np.exp(self.costs.log_seconds).tolist()
        plain = took[0]
        trials_took = trials_brought = 0.0
        drafts, trials = self.draft_account, self.trial_account
        for made, is_trial, lengths in zip(run.made, run.trials, run.accept_lengths, strict=True):
            seconds, tokens = took[self.costs.places[made]], fmean(lengths) if lengths else 0.0
            drafts += settings.loss_share * seconds / plain
            trials += settings.loss_share * seconds / plain
            if made is not None:
                drafts += tokens - seconds / plain
            if is_trial:
                trials_took, trials_brought = trials_took + seconds, trials_brought + tokens
        if trials_took:
            # Of the run as a whole: what one step loses by chance another one wins.
            lost = trials_took - trials_brought / self.rate(self.best())
            trials -= max(lost, settings.least_loss * trials_took) / plain
        least = -settings.first_loss  # what is lost beyond that is forgiven, or drafts never return
        self.draft_account = max(least, min(drafts, settings.most_for_drafts))
        self.trial_account = max(least, min(trials, settings.most_for_trials))


def both(free: Sequence[float], own: Sequence[float]) -> float:
    """The tokens of a tree with the nodes of two drafts, by how often each reaches depth 1, ..."""
    return sum(map(max, zip_longest(free, own, fillvalue=0.0)))


class PlannedDecoding(Planner):
    """One decoding under a plan that it shares with others."""

    def __init__(
        self,
        plan: AdaptivePlan,
        on_finish: Callable[[], object] = lambda: None,
        plan_at: Callable[[int, int, RowSampling, Mix], AdaptivePlan] | None = None,
    ):
        """`on_finish` is called after the last step.

        `plan_at` is asked for the plan of steps of so many rows at so many columns, sampled like
        this, where these have plans of their own: a long answer goes on with another one than it
        has begun with, and so does a batch that rows join or leave.
        """
        self.plan, self.on_finish, self.plan_at = plan, on_finish, plan_at
        self.run: Run | None = None  # the current one
        self.free_nodes = FIRST_FREE_NODES
        self.unused = 0  # free drafts in a row that did not pay
        # Of the steps that are not learnt from yet, and whether they are on trial.
        self.made: list[tuple[Size, bool]] = []
        self.kept: Guesses | None = None  # of a free draft, for the current step

    def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
        """The nodes of a free draft that pay, or else a draft of the current run's size."""
        if not ahead:
            self.made = []  # a step that was drafted for and not made is forgotten
        if self.run is None:
            self.run = self.plan.next_run(None)
        run, self.kept = self.run, None
        if run.prices is not None:
            self.kept = self._free_draft(propose, run, run.prices)
            if self.kept is not None:
                return self.kept
        self.made.append((run.size, run.is_trial))
        if run.size is None:
            return None
        proposal = propose(run.size)
        # The host knows form and not tokens: what was drafted is told by nodes and depth.
        for stop in self.plan.acceptance.stops(run.size):
            if stop is not None and (stop.nodes, stop.depth) == size_of(proposal):
                self.made[-1] = stop, run.is_trial
        return proposal

    @property
    def knows_next(self) -> bool:
        """Within a run of drafts that are all of one size."""
        run = self.run
        if run is None or run.prices is not None:
            return False
        return len(run.seconds) + len(self.made) < self.plan.settings.run_steps

    def _free_draft(self, propose: Propose, run: Run, prices: Prices) -> Guesses | None:
        """The nodes of a free draft that pay, if any."""
        most = self.plan.free[-1].nodes
        # As many as the run's own drafts have: those get such nodes too, found but once.
        nodes = self.free_nodes if run.size is None else max(self.free_nodes, run.size.nodes)
        free = propose(free_budget(min(nodes, most)))
        assert isinstance(free, Guesses)
        if free.num_nodes == 1:
            return None
        size, is_trial = self.plan.cut(free, run, prices)
        if size is None:
            self.unused += 1
            if self.unused % UNUSED_STEPS == 0:
                self.free_nodes = max(FEWEST_FREE_NODES, self.free_nodes // 2)
            return None
        self.unused = 0
        # All that were found have paid: look for more next time.
        if size.nodes >= self.free_nodes:
            self.free_nodes = min(2 * self.free_nodes, most)
        self.made.append((size, is_trial))
        run.lost += prices.free[self.plan.free.index(size)]
        return free.best(size.nodes)

    def meet(self, rows: int, columns: int, sampling: RowSampling, mix: Mix = EVERYTHING) -> None:
        """Go on with the plan of such steps; what steps so far have taught stays with theirs."""
        plan = self.plan if self.plan_at is None else self.plan_at(rows, columns, sampling, mix)
        if plan is not self.plan:
            last = self._end_run()
            self.plan, self.run = plan, plan.next_run(last)

    def learn(self, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record a step; after the last one of a run the plan chooses again."""
        run = self.run
        assert run is not None
        if self.kept is not None:
            self.plan.record_free(self.kept, accept_lengths)
            run.lost -= fmean(accept_lengths) if accept_lengths else 0.0
        made, is_trial = self.made.pop(0)
        run.made.append(made)
        run.trials.append(is_trial)
        run.seconds.append(seconds)
        run.accept_lengths.append(accept_lengths)
        if len(run.seconds) == self.plan.settings.run_steps:
            self.run = self.plan.next_run(self._end_run())

    def finish(self) -> None:
        """Learn from a run that the end has cut short."""
        self._end_run()
        self.on_finish()

    def _end_run(self) -> Run | None:
        """Learn from the run so far, if it has made a step; returns it then."""
        run, self.run = self.run, None
        if run is None or not run.seconds:
            return None
        self.plan.record(run)
        return run


def size_of(proposal: Proposal) -> tuple[int, int]:
    """Nodes and depth of a proposal."""
    return proposal.num_nodes, proposal.max_depth
