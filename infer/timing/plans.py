"""The plans of a decoder, one for each kind of request, and what new ones begin with."""

import math
from functools import cached_property
from pathlib import Path
from threading import RLock

import numpy as np

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.planner import AdaptivePlan, PlannedDecoding, Planner
from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS
from drafthead.infer.engine.step_costs import StepCosts, Table
from drafthead.infer.timing.step_timing import StepSeconds
from drafthead.infer.timing.stored_costs import StepKind, costs_file, read_costs, write_costs

# Change of the logarithm of a size's cost, in plain steps, that is worth writing to disk.
NOTICEABLE = math.log(1.1)


class Plans:
    """What a decoder has learnt about its steps: costs by kind, acceptance also by temperature.

    Several threads may ask and learn at once.
    """

    def __init__(self, target: Target, drafter: Drafter):
        self.target, self.drafter = target, drafter
        self.plans: dict[tuple[StepKind, float], AdaptivePlan] = {}
        self.kept: dict[StepKind, Table] = {}  # costs in plain steps [S] that are on disk
        self.lock = RLock()

    @cached_property
    def file(self) -> Path:
        """Where costs are kept for later processes."""
        return costs_file(self.target, self.drafter)

    def chances(self, outlook: int) -> dict[Budget, tuple[float, ...]]:
        """How likely a draft of each size is accepted to each depth, before any is made."""
        drafter = self.drafter
        return {budget: drafter.chances_at(outlook, budget) for budget in drafter.budgets}

    @cached_property
    def by_kind(self) -> dict[StepKind, StepCosts]:
        """All known costs; at first those that earlier processes have kept."""
        found = read_costs(self.file, self.drafter)
        self.kept = {kind: in_plain_steps(costs) for kind, costs in found.items()}
        return found

    @cached_property
    def fixed_budget(self) -> Budget | None:
        """A size that depends on no clock: by the drafter's measured acceptance and guessed costs.

        For rules under which the text of a seed depends on the tree: the main source's alone.
        """
        chances = {budget: self.drafter.chances(budget) for budget in self.drafter.main_budgets}
        return AdaptivePlan(StepCosts(tuple(chances)), lambda outlook: chances).best()

    def costs(self, kind: StepKind) -> StepCosts:
        """What is known of a kind; at first what is known of the most similar one, if any is."""
        with self.lock:
            if kind not in self.by_kind:
                costs = StepCosts(self.drafter.budgets)
                known = [k for k, other in self.by_kind.items() if not other.is_guess]
                if known:
                    nearest = self.by_kind[min(known, key=kind.distance)]
                    with nearest.lock:
                        costs.go_on_from(nearest.mean, nearest.covariance)
                self.by_kind[kind] = costs
            return self.by_kind[kind]

    def plan(self, kind: StepKind, temperature: float) -> AdaptivePlan:
        """The plan of all decodings like this one."""
        key = kind, round(temperature, 1)
        with self.lock:
            if key not in self.plans:
                settings = DEFAULT_SETTINGS.for_rows(kind.rows)
                self.plans[key] = AdaptivePlan(
                    self.costs(kind), self.chances, self.drafter.stops, settings
                )
            return self.plans[key]

    def planner(self, kind: StepKind, temperature: float) -> Planner:
        """What chooses the sizes of one decoding."""
        return PlannedDecoding(self.plan(kind, temperature), self.keep)

    def set_timed(self, kind: StepKind, seconds: StepSeconds) -> None:
        """Believe and keep what steps of a kind were timed at."""
        costs = self.costs(kind)
        with costs.lock:
            costs.set_timed(seconds)
        self.kept.pop(kind, None)
        self.keep()

    def keep(self) -> None:
        """Write what was learnt to disk if that is much beyond what is there."""
        with self.lock:
            now = {
                kind: in_plain_steps(costs)
                for kind, costs in self.by_kind.items()
                if costs.speed_known  # else nothing was learnt since it was read
            }
            if any(differs(found, self.kept.get(kind)) for kind, found in now.items()):
                self.kept |= now
                write_costs(self.file, {kind: self.by_kind[kind] for kind in now})


def in_plain_steps(costs: StepCosts) -> Table:
    """Logarithms of the costs [S] of all sizes over that of a plain step."""
    mean = costs.mean  # one object, whatever other threads learn meanwhile
    return mean - mean[0]


def differs(found: Table, kept: Table | None) -> bool:
    """Whether costs [S] are noticeably not those that were kept."""
    return kept is None or bool(np.abs(found - kept).max() > NOTICEABLE)
