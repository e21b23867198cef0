"""Steps of the engine, timed for each size of tree.

What else a machine does makes the same step half as long again from one second to the next. So
every size is timed between plain steps, as a multiple of these, and small and large trees correct
each other: none takes longer than a larger one.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from tqdm import trange

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.graph_stepper import stepper_for
from drafthead.infer.engine.loop import decode
from drafthead.infer.engine.planner import Planner
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers import Verifier

PROMPT_TOKENS = 64
ROUNDS = 10  # of visits to every size, some time apart: what else runs comes in bursts
CONTENDS = 0.8  # a size is visited again that promises so many times the best's tokens per second
ENOUGH_SECONDS = 6  # of timed steps: no further round begins behind them
TIMED_STEPS = 3  # of each visit, after UNTIMED_STEPS that are not counted
UNTIMED_STEPS = 2
STEPS_A_VISIT = UNTIMED_STEPS + TIMED_STEPS

StepSeconds = dict[Budget | None, float]  # None: a step without a draft


@dataclass
class Visit:
    """Several steps on end of one budget, or of none."""

    budget: Budget | None
    seconds: list[float] = field(default_factory=list)

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps that count."""
        return self.seconds[UNTIMED_STEPS:]


class Round(Planner):
    """A visit to every budget, and one to plain decoding before each.

    Passes of one size leave their weights in the processor's cache for the next: single steps that
    take turns would each look slower than when decoding goes on with one size.
    """

    def __init__(self, budgets: Sequence[Budget]):
        self.visits = [Visit(stop) for budget in budgets for stop in (None, budget)]
        self.place = 0  # of the current visit

    @property
    def steps(self) -> int:
        """Steps of the whole round."""
        return STEPS_A_VISIT * len(self.visits)

    def choose(self) -> Budget | None:
        """The budget of the current visit."""
        return self.visits[self.place].budget

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """One more step of the visit is done."""
        visit = self.visits[self.place]
        visit.seconds.append(seconds)
        if len(visit.seconds) == STEPS_A_VISIT:
            self.place += 1


def tour(tokens: Mapping[Budget, float], go: Callable[[Round], object]) -> list[Visit]:
    """All visits of `ROUNDS` rounds, or of fewer once enough was timed; `go` makes a round's steps.

    Of each budget so many `tokens` a step are expected. All are visited once, and then those that
    could still be the best: time is spent on what it decides.
    """
    order, left, visits = random.Random(0), list(tokens), list[Visit]()
    for _ in range(ROUNDS):
        this_round = Round(left)
        go(this_round)
        visits += this_round.visits
        if sum(sum(visit.timed) for visit in visits) >= ENOUGH_SECONDS:
            break
        left = contenders(tokens, ratios_to_plain(visits))
        order.shuffle(left)  # what comes at intervals does not hit the same ones
    return visits


def contenders(tokens: Mapping[Budget, float], ratios: Mapping[Budget, float]) -> list[Budget]:
    """Budgets that promise nearly as many tokens per second as the best, or as plain decoding.

    Of 1.4, 1.8 and 2 tokens in 1.2, 1.3 and 2 times a plain step the first two are left.
    """
    promised = {budget: tokens[budget] / ratios[budget] for budget in tokens}
    best = max(promised, key=promised.__getitem__)
    enough = CONTENDS * max(1.0, promised[best])
    return [budget for budget, promise in promised.items() if promise >= enough] or [best]


def costs_of(visits: Sequence[Visit]) -> StepSeconds:
    """Seconds of a plain step, and of each budget's: its ratio to plain steps times these."""
    plain = median(seconds for visit in visits if visit.budget is None for seconds in visit.timed)
    ratios = monotone(ratios_to_plain(visits))
    return {None: plain} | {budget: ratio * plain for budget, ratio in ratios.items()}


def ratios_to_plain(visits: Sequence[Visit]) -> dict[Budget, float]:
    """How many plain steps a step of each budget takes: the median over its visits.

    Each is compared with the plain visits right before and right behind it. Steps of 3 ms between
    plain ones of 2 and 2, and of 4.5 ms in a slow moment between plain ones of 3 and 3, are 1.5.
    """
    found: dict[Budget, list[float]] = {}
    for place, visit in enumerate(visits):
        if visit.budget is not None:
            beside = [s for near in visits[place - 1 : place + 2 : 2] for s in near.timed]
            found.setdefault(visit.budget, []).append(median(visit.timed) / median(beside))
    return {budget: median(ratios) for budget, ratios in found.items()}


def monotone(ratios: Mapping[Budget, float]) -> dict[Budget, float]:
    """The same with no budget above a larger one, nor any below 1.

    A budget that seems to take longer than a larger one shares its mean with it, until there is
    none. With 2, 3 and 4 nodes at 1.3, 1.2 and 1.4 the first two become 1.25.
    """
    level = dict(ratios)
    pairs = [(small, large) for small in level for large in level if _within(small, large)]
    while wrong := [(small, large) for small, large in pairs if level[small] > level[large] + 1e-6]:
        for small, large in wrong:
            if level[small] > level[large]:
                level[small] = level[large] = (level[small] + level[large]) / 2
    return {budget: max(1.0, ratio) for budget, ratio in level.items()}


def _within(small: Budget, large: Budget) -> bool:
    """Whether a budget is at most as large as another, in nodes and in depth."""
    return small.nodes <= large.nodes and small.depth <= large.depth


def time_steps(target: Target, drafter: Drafter, batch: int, rule: Verifier) -> StepSeconds:
    """Seconds of a step under `rule` for each budget of the drafter, and of a plain one.

    Takes two seconds to about ten, and longer only where a single round does, most of it for sizes
    that could be the best by the acceptance that the drafter knows of. All rounds begin behind
    `PROMPT_TOKENS` random tokens in each of `batch` rows, short texts, as most answers do:
    attention over a long one would be a larger part of the steps.
    """
    prompts = torch.randint(
        target.vocab_size, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    ).tolist()
    sampling = SamplingConfig(temperature=0.0 if rule.greedy else 1.0)

    def go(this_round: Round) -> None:
        """Decode as many steps as the round has, behind a fresh prompt."""
        most = this_round.steps * (1 + drafter.budgets[-1].depth) + 1
        request = Request(prompts, [most] * batch, sampling, [0] * batch, frozenset())
        run = BatchRun(request, target.device)
        stepper = stepper_for(target, run, drafter.features, rule, drafter.budgets[-1].nodes)
        steps = decode(stepper, drafter, this_round)
        next(steps)  # the prompt
        # The bar shows when it takes longer than a few seconds.
        for _ in trange(this_round.steps, desc="timing steps", unit="step", delay=3, leave=False):
            next(steps)

    tokens = {budget: 1 + sum(drafter.chances(budget)) for budget in drafter.budgets}
    return costs_of(tour(tokens, go))
