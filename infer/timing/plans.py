"""The plans of a decoder, one for each kind of request, and what is kept of them on disk.

The next process that runs the same models on this machine begins with what was learnt before.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import RLock

import numpy as np
from pydantic import TypeAdapter

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.sampling import RowSampling
from drafthead.core.settings import AtLeastOne
from drafthead.core.storage.disk_cache import cache_folder, read_cached, write_cached
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.planning.draft_acceptance import Table, is_tree
from drafthead.infer.planning.planner import (
    DEFAULT_SETTINGS,
    EVERYTHING,
    AdaptivePlan,
    Mix,
    PlannedDecoding,
    Planner,
)
from drafthead.infer.planning.step_costs import StepCosts, guessed_node
from drafthead.infer.timing.machine import describe_machine, describe_versions
from drafthead.infer.verifiers import Verifier, rule_of_rows

logger = logging.getLogger(__name__)

# Goes up when steps change or their costs are stored in another way: older files are not read.
COSTS_VERSION = 11
# Change of the logarithm of a size's cost, in plain steps, that is worth writing to disk.
NOTICEABLE = math.log(1.1)
MOST_PLANS = 64  # of all kinds and temperatures
# Tokens before a step up to which contexts count as one length.
FEWEST_COLUMNS = 1024


@dataclass(frozen=True)
class StepKind:
    """The kind of a step: all that its time depends on but its size, the models and the machine."""

    rule: str
    rows: AtLeastOne  # see `rows_that_share`; those that run now, of a batch that grows and shrinks
    filters: bool  # top-k, top-p, ...
    processors: bool
    columns: AtLeastOne = FEWEST_COLUMNS  # see `columns_that_share`

    @classmethod
    def of(cls, run: BatchRun, rule: Verifier) -> "StepKind":
        """The kind of a batch's steps."""
        request = run.request
        name = rule.name if request.beams is None else f"{request.beams.num_beams} beams"
        filters, processors = not run.sampling.whole, bool(request.processors)
        rows, columns = rows_that_share(run.num_rows), columns_that_share(run.columns)
        return cls(name, rows, filters, processors, columns)

    def distance(self, other: "StepKind") -> float:
        """The distance of another kind: 1 for each property, or each doubling of a number."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return sum(abs(math.log2(a / b)) if type(a) is int else a != b for a, b in pairs)


def rows_that_share(batch: int) -> int:
    """The number of rows as which a batch counts: 3 rows and 4 share what they learn."""
    return 2 ** (batch - 1).bit_length()


def columns_that_share(columns: int) -> int:
    """The context as which one of so many tokens counts: 1,100 and 2,000 share what they learn.

    Each query of a tree reads all columns, a plain step reads them once: the longer the text, the
    dearer are trees beside plain steps.
    """
    return max(FEWEST_COLUMNS, 2 ** (columns - 1).bit_length())


class Plans:
    """A decoder's knowledge of its steps: costs by kind, acceptance also by temperature.

    Several threads may ask and learn at once.
    """

    def __init__(self, target: Target, drafter: Drafter):
        self.target, self.drafter = target, drafter
        # By temperature, None where those of a batch's rows differ, and by what drafts for them.
        self.plans: dict[tuple[StepKind, float | None, Mix], AdaptivePlan] = {}
        self.kept: dict[StepKind, Table] = {}  # costs in plain steps [S] that are on disk
        self.lock = RLock()

    @cached_property
    def file(self) -> Path:
        """The file of costs for later processes."""
        return costs_file(self.target, self.drafter)

    @cached_property
    def by_kind(self) -> dict[StepKind, StepCosts]:
        """All known costs; at first those that earlier processes have kept."""
        found = read_costs(self.file, self._unknown)
        self.kept = {kind: in_plain_steps(costs) for kind, costs in found.items()}
        return found

    @cached_property
    def fixed_budget(self) -> Budget | None:
        """A size that depends on no clock: by the drafter's measured acceptance and guessed costs.

        For rules under which the text of a seed depends on the tree: free drafts beside others are
        left out.
        """
        *_, last = budgets = self.drafter.budgets
        sizes = [size for size in budgets if size.levels or not last.levels]
        if not is_tree(last):  # children are drawn in chains
            sizes = [size for size in sizes if not is_tree(size)]
        return AdaptivePlan(StepCosts(sizes)).best()

    def _unknown(self, kind: StepKind) -> StepCosts:
        """The guess for steps of a kind."""
        return StepCosts(self.drafter.budgets, guessed_node(self.target.device, kind.rows))

    def costs(self, kind: StepKind) -> StepCosts:
        """The costs of a kind; at first those of the most similar one, if any are known."""
        with self.lock:
            if kind not in self.by_kind:
                costs = self._unknown(kind)
                known = [k for k, other in self.by_kind.items() if not other.is_guess]
                if known:
                    nearest = self.by_kind[min(known, key=kind.distance)]
                    with nearest.lock:
                        costs.go_on_from(nearest.mean, nearest.covariance)
                self.by_kind[kind] = costs
            return self.by_kind[kind]

    def plan(
        self, kind: StepKind, temperature: float | None, mix: Mix = EVERYTHING
    ) -> AdaptivePlan:
        """The plan of all decodings like this one; at first it knows what others know, of batches
        and contexts of other sizes.
        """
        key = kind, None if temperature is None else round(temperature, 1), mix
        with self.lock:
            if key not in self.plans:
                settings = DEFAULT_SETTINGS.for_rows(kind.rows)
                plan = AdaptivePlan(self.costs(kind), settings)
                near = [
                    other
                    for other in self.plans
                    if (replace(other[0], rows=kind.rows, columns=kind.columns), *other[1:]) == key
                ]
                if near:
                    plan.go_on_from(self.plans[min(near, key=lambda k: kind.distance(k[0]))])
                if len(self.plans) == MOST_PLANS:
                    del self.plans[next(iter(self.plans))]
                self.plans[key] = plan
            else:  # the last that was asked for is forgotten last
                self.plans[key] = self.plans.pop(key)
            return self.plans[key]

    def planner(self, kind: StepKind, temperature: float | None) -> Planner:
        """The planner of the sizes of one decoding."""

        def plan_at(rows: int, columns: int, sampling: RowSampling, mix: Mix) -> AdaptivePlan:
            """The plan of the same decoding with so many rows and columns, sampled like this."""
            now = replace(
                kind,
                rule=rule_of_rows(kind.rule, sampling.greedy),
                rows=rows_that_share(rows),
                filters=not sampling.whole,
                columns=columns_that_share(columns),
            )
            return self.plan(now, sampling.temperature, mix)

        return PlannedDecoding(self.plan(kind, temperature), self.keep, plan_at)

    def keep_timed(self, kind: StepKind) -> None:
        """Write what steps of a kind were timed at to disk."""
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


def costs_file(target: Target, drafter: Drafter) -> Path:
    """The file of the costs of these models' steps on this machine."""
    about = [
        COSTS_VERSION,
        describe_machine(),
        describe_versions(),
        target.config.to_diff_dict(),
        target.precision,
        type(target).__name__,
        target.backend.kernels,
        repr(drafter),
        [(budget.nodes, budget.levels) for budget in drafter.budgets],
    ]
    digest = hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode()).hexdigest()
    return cache_folder("step_costs") / f"{digest[:16]}.json"


def read_costs(path: Path, unknown: Callable[[StepKind], StepCosts]) -> dict[StepKind, StepCosts]:
    """The kept costs of each kind of steps; none, with a warning, if the file is damaged.

    `unknown(kind)` is what is guessed of a kind.
    """
    try:
        return {each.kind: each.costs(unknown(each.kind)) for each in read_kept(path)}
    except DAMAGE:
        logger.warning("%s is damaged; the costs of steps are learnt again", path)
        return {}


# What reading may raise when a file is not as it was written.
DAMAGE = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class KeptCosts:
    """The costs of one kind of steps as they are kept."""

    kind: StepKind
    was_timed: bool
    mean: list[float]
    covariance: list[list[float]]

    @classmethod
    def of(cls, kind: StepKind, costs: StepCosts) -> "KeptCosts":
        """The costs, rounded."""
        with costs.lock:
            mean, covariance = costs.mean, costs.covariance
        rounded = ((covariance + covariance.T) / 2).round(8)
        return cls(kind, costs.was_timed, mean.tolist(), rounded.tolist())

    def costs(self, costs: StepCosts) -> StepCosts:
        """These costs, in place of what is guessed of them; may raise any of DAMAGE."""
        mean, covariance = np.array(self.mean, float), np.array(self.covariance, float)
        if mean.shape != costs.mean.shape or covariance.shape != costs.guess.shape:
            raise ValueError("no costs of these sizes")
        most = np.abs(mean).max(), np.abs(covariance).max()
        if not (most[0] < MOST_LOG_SECONDS and most[1] < MOST_VARIANCE):  # nor for NaN
            raise ValueError("impossible costs")
        is_symmetric = np.array_equal(covariance, covariance.T)
        if not is_symmetric or np.linalg.eigvalsh(covariance)[0] < -1e-6:
            raise ValueError("no covariance")
        costs.go_on_from(mean, covariance)
        costs.was_timed = self.was_timed
        return costs


KEPT = TypeAdapter(list[KeptCosts])


def read_kept(path: Path) -> list[KeptCosts]:
    """The costs in a file; none if there is no file. May raise any of DAMAGE."""
    text = read_cached(path)
    return [] if text is None else KEPT.validate_json(text)


# No step takes less than a nanosecond or more than ten years.
MOST_LOG_SECONDS, MOST_VARIANCE = 21.0, 400.0


def write_costs(path: Path, learnt: Mapping[StepKind, StepCosts]) -> None:
    """Keep the costs where that is possible, beside other kinds that another process has kept."""
    try:
        others = [each for each in read_kept(path) if each.kind not in learnt]
    except DAMAGE:
        others = []
    kept = others + [KeptCosts.of(kind, costs) for kind, costs in learnt.items()]
    write_cached(path, KEPT.dump_json(kept).decode())
