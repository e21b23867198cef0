"""What a step costs on this machine: real steps of the engine, timed for each size of tree.

Timing takes about a second and its result is kept for the next time that the same models run on the
same machine.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from drafthead.heads.base import Drafter
from drafthead.heads.checkpoint import write_text
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target import Target
from drafthead.heads.tree import Budget
from drafthead.infer.engine import speculate
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.planner import Planner
from drafthead.infer.run import Request, Run
from drafthead.infer.verifiers import Verifier

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 64
VISITS = 4  # of each budget, some time apart: what else runs on a machine comes in bursts
TIMED_STEPS = 3  # of each visit, after UNTIMED_STEPS that are not counted
UNTIMED_STEPS = 2

StepSeconds = dict[Budget | None, float]  # None: a step without a draft


class Tour(Planner):
    """Every budget, and no draft as well, timed for several steps on end, in several rounds.

    Passes of one size leave their weights in the processor's cache for the next: steps that take
    turns with others would each look slower than when decoding goes on with one size. Sizes that
    lose to plain decoding even when all of their deepest path is accepted are visited once only.
    """

    steps = UNTIMED_STEPS + TIMED_STEPS  # of a visit

    def __init__(self, budgets: Sequence[Budget]):
        self.stops: list[Budget | None] = [None, *budgets]
        self.visits = 0  # completed rounds
        self.place = 0  # steps of the current round
        self.seconds: dict[Budget | None, list[float]] = {stop: [] for stop in self.stops}

    @property
    def steps_left(self) -> int:
        """Steps until the tour is over, if no more stops are given up."""
        return self.steps * len(self.stops) * (VISITS - self.visits) - self.place

    def choose(self) -> Budget | None:
        """The current stop."""
        return self.stops[self.place // self.steps]

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """One step of the tour is done; the first ones of a visit are not counted."""
        if self.place % self.steps >= UNTIMED_STEPS:
            self.seconds[budget].append(seconds)
        self.place += 1
        if self.place == self.steps * len(self.stops):
            self.visits, self.place = self.visits + 1, 0
            self.stops = [stop for stop in self.stops if self._may_win(stop)]

    def _may_win(self, stop: Budget | None) -> bool:
        """Whether the most that a step can commit, every level and the bonus, comes fast enough."""
        most = 1 + (stop.depth if stop else 0)
        return min(self.seconds[stop]) <= most * min(self.seconds[None])


def time_steps(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> StepSeconds:
    """Seconds of a step under `rule` for each budget of the drafter, and of a plain one.

    The quickest of several counts: what else runs on a machine only ever adds time.
    """
    tour = Tour(drafter.budgets)
    prompts = torch.randint(
        target.vocab_size, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    ).tolist()
    most = tour.steps_left * (1 + drafter.budgets[-1].depth) + 1
    sampling = SamplingConfig(temperature=0.0 if rule.greedy else 1.0)
    request = Request(prompts, [most] * batch, sampling, [0] * batch, frozenset())
    run = Run(target, request, drafter.features, drafter.budgets[-1].nodes)
    steps = speculate(run, drafter, tour, rule)
    next(steps)  # the prompt
    # The bar shows when it takes longer than a few seconds.
    with tqdm(desc="timing steps", unit="step", delay=3, leave=False) as bar:
        while tour.steps_left > 0:
            next(steps)
            bar.total = bar.n + 1 + tour.steps_left
            bar.update()
    quickest = {stop: min(seconds) for stop, seconds in tour.seconds.items()}
    return {stop: least_of_larger(stop, quickest) for stop in quickest}


def least_of_larger(stop: Budget | None, seconds: StepSeconds) -> float:
    """The least time that was counted for a tree at least as large: a smaller one takes no longer.

    What disturbed the steps of one budget is thereby mended by those of the next larger ones. With
    2.4 ms for 2 nodes and 2.2 ms for 3, 2 nodes take 2.2 ms as well.
    """
    return min(
        took
        for other, took in seconds.items()
        if stop is None or (other and other.nodes >= stop.nodes and other.depth >= stop.depth)
    )


def step_seconds(
    target: Target, drafter: Drafter, batch: int, rule: Verifier, fresh: bool = False
) -> StepSeconds:
    """`time_steps`, from the last time if the same was timed before and is not wanted `fresh`."""
    kept = cost_file(target, drafter, batch, rule)
    if kept.exists() and not fresh:
        try:
            return read_costs(kept)
        except (ValueError, TypeError):
            logger.warning("%s cannot be read; steps are timed anew", kept)
    costs = time_steps(target, drafter, batch, rule)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_text(kept, json.dumps([[_fields(stop), seconds] for stop, seconds in costs.items()]))
    return costs


def rows_timed(rule: Verifier, batch: int) -> int:
    """For how many rows steps are timed: batches of 3 and 4 share one timing.

    The budget of a rule that draws children is chosen as for a single row.
    """
    return 1 if rule.draws_children else 2 ** (batch - 1).bit_length()


def read_costs(path: Path) -> StepSeconds:
    """Costs that were written before; raises ValueError or TypeError for anything else."""
    return {
        None if stop is None else Budget(*stop): float(seconds)
        for stop, seconds in json.loads(path.read_text())
    }


def _fields(stop: Budget | None) -> list[int] | None:
    return None if stop is None else [stop.nodes, stop.depth]


def cost_file(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> Path:
    """Where the costs of these models under a rule on this machine are kept."""
    about = [
        describe_machine(),
        describe_versions(),
        target.config.to_diff_dict(),
        str(target.dtype),
        type(target).__name__,
        drafter.identity(),
        [_fields(budget) for budget in drafter.budgets],
        batch,
        rule.name,
    ]
    digest = hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafthead"
    return folder / "step_costs" / f"{digest[:16]}.json"
