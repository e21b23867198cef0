"""Real steps of the engine, timed for each size of tree, on purpose and before decoding.

Decoding learns these times by itself; this is for servers that want to know them first, and for
tables. Background load can make a step 1.5 times as long from one second to the next. So every
size is timed between plain steps, as a multiple of these. Small and large trees correct each other:
none takes longer than a larger one.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

from tqdm import trange

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.graph_stepper import stepper_for
from drafthead.infer.engine.loop import decode
from drafthead.infer.engine.planner import Planner
from drafthead.infer.engine.step_costs import StepCosts
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers import Verifier


@dataclass(frozen=True)
class TimingSettings:
    """How long steps are timed, and which sizes for longest."""

    # Random tokens before the first timed step. Short, as most prompts are: attention over a long
    # text would be a larger part of the steps.
    prompt_tokens: int = 64
    # Largest number of visits to a size. They lie some time apart, as other load comes in bursts.
    rounds: int = 10
    # Seconds of timed steps after which no further round begins, and the first one goes on only
    # with sizes that could still win.
    enough_seconds: float = 6
    # Share of the best size's tokens per second that a size must promise to be visited again.
    contender_share: float = 0.8
    # Steps at the beginning of a visit that are not timed: the CPU caches hold another size's data.
    untimed_steps: int = 2
    # Steps of a visit that are timed.
    timed_steps: int = 3

    @property
    def visit_steps(self) -> int:
        """All steps of a visit."""
        return self.untimed_steps + self.timed_steps


TIMING_SETTINGS = TimingSettings()
ONE_STEP_EACH = TimingSettings(untimed_steps=1, timed_steps=0)  # only to make the graphs
StepSeconds = dict[Budget | None, float]  # None: a step without a draft


@dataclass
class Visit:
    """Several steps in a row of one budget, or of none."""

    budget: Budget | None
    seconds: list[float] = field(default_factory=list)  # of the timed steps


class Round(Planner):
    """A visit to every budget, and one to plain decoding before each.

    Passes of one size leave their weights in the CPU cache for the next: single steps that take
    turns would each look slower than when decoding goes on with one size.
    """

    def __init__(self, budgets: Sequence[Budget], settings: TimingSettings):
        self.settings = settings
        self.visits = [Visit(choice) for budget in budgets for choice in (None, budget)]
        self.steps_done = 0

    @property
    def steps(self) -> int:
        """Steps of the whole round."""
        return self.settings.visit_steps * len(self.visits)

    def choose(self, outlook: int) -> Budget | None:
        """The budget of the current visit."""
        return self.visits[self.steps_done // self.settings.visit_steps].budget

    def learn(self, budget: Budget | None, accept_lengths: Sequence[int], seconds: float) -> None:
        """Record one more step of the visit."""
        visit, step = divmod(self.steps_done, self.settings.visit_steps)
        if step >= self.settings.untimed_steps:
            self.visits[visit].seconds.append(seconds)
        self.steps_done += 1


def time_in_rounds(
    tokens: Mapping[Budget, float],
    run_round: Callable[[Round], object],
    settings: TimingSettings,
) -> list[Visit]:
    """All visits of `settings.rounds` rounds, or of fewer once enough was timed.

    `tokens[budget]` is the expected yield per step, and `run_round` makes a round's steps. Later
    rounds time only budgets that could still win.
    """
    order, visits = random.Random(0), first_visits(tokens, run_round, settings)
    for _ in range(settings.rounds - 1):
        if timed_seconds(visits) >= settings.enough_seconds:
            break
        budgets = contenders(tokens, ratios_to_plain(visits), settings.contender_share)
        order.shuffle(budgets)  # load that comes at intervals does not hit the same ones
        visits += visits_to(budgets, run_round, settings)
    return visits


def first_visits(
    tokens: Mapping[Budget, float],
    run_round: Callable[[Round], object],
    settings: TimingSettings,
) -> list[Visit]:
    """A visit to every budget, from small to large; once enough was timed, to those that may win.

    With 16 rows a pass over 64 nodes each takes a second, and trees of 8 were too dear already.
    """
    visits: list[Visit] = []
    for _, same_size in groupby(sorted(tokens, key=doublings), key=doublings):
        budgets = list(same_size)
        if timed_seconds(visits) >= settings.enough_seconds:
            ratios = ratios_to_plain(visits)
            budgets = [b for b in budgets if may_win(b, tokens, ratios, settings.contender_share)]
        if budgets:
            visits += visits_to(budgets, run_round, settings)
    return visits


def visits_to(
    budgets: Sequence[Budget], run_round: Callable[[Round], object], settings: TimingSettings
) -> list[Visit]:
    """The visits of one round."""
    this_round = Round(budgets, settings)
    run_round(this_round)
    return this_round.visits


def timed_seconds(visits: Sequence[Visit]) -> float:
    """Seconds of all timed steps."""
    return sum(sum(visit.seconds) for visit in visits)


def doublings(budget: Budget) -> int:
    """Of the nodes: 2 for 3 and 4 nodes, 3 for 5 to 8."""
    return (budget.nodes - 1).bit_length()


def may_win(
    budget: Budget, tokens: Mapping[Budget, float], ratios: Mapping[Budget, float], share: float
) -> bool:
    """Whether a budget would promise enough if it took no longer than smaller ones that were timed.

    Where 8 nodes bring 2 tokens in twice a plain step's time, 64 nodes that bring 1.5 cannot win.
    """
    at_least = max((ratio for small, ratio in ratios.items() if _within(small, budget)), default=1)
    best = max(tokens[timed] / ratio for timed, ratio in ratios.items())
    return tokens[budget] / at_least >= share * max(1.0, best)


def contenders(
    tokens: Mapping[Budget, float], ratios: Mapping[Budget, float], share: float
) -> list[Budget]:
    """Budgets that promise `share` of the tokens per second of the best, or of plain decoding.

    Of 1.4, 1.8 and 2 tokens in 1.2, 1.3 and 2 times a plain step the first two reach 0.8.
    """
    promised = {budget: tokens[budget] / ratios[budget] for budget in tokens}
    best = max(promised, key=promised.__getitem__)
    enough = share * max(1.0, promised[best])
    return [budget for budget, promise in promised.items() if promise >= enough] or [best]


def sizes_to_make(drafter: Drafter, costs: StepCosts) -> list[Budget]:
    """Sizes that a process makes a step of before it serves, so that their graphs are there.

    All of them, or those that could win where all of them would take longer than timing does.
    """
    tokens = expected_tokens(drafter)
    seconds = {budget: costs.seconds(budget) for budget in tokens}
    if sum(seconds.values()) < TIMING_SETTINGS.enough_seconds:
        return list(tokens)
    ratios = {budget: took / costs.seconds(None) for budget, took in seconds.items()}
    return contenders(tokens, ratios, TIMING_SETTINGS.contender_share)


def expected_tokens(drafter: Drafter) -> dict[Budget, float]:
    """What a step of each size brings by the acceptance that the drafter expects."""
    return {budget: 1 + sum(drafter.chances(budget)) for budget in drafter.budgets}


def seconds_by_budget(visits: Sequence[Visit]) -> StepSeconds:
    """Seconds of a plain step, and of each budget visited: its ratio to plain ones times these."""
    plain = median(seconds for visit in visits if visit.budget is None for seconds in visit.seconds)
    ratios = monotone(ratios_to_plain(visits))
    return {None: plain} | {budget: ratio * plain for budget, ratio in ratios.items()}


def ratios_to_plain(visits: Sequence[Visit]) -> dict[Budget, float]:
    """How many plain steps a step of each budget takes: the median over its visits.

    Each is compared with the plain visits right before and right after it. Steps of 3 ms between
    plain ones of 2 and 2, and of 4.5 ms in a slow moment between plain ones of 3 and 3, are 1.5.
    """
    ratios: dict[Budget, list[float]] = {}
    for index, visit in enumerate(visits):
        if visit.budget is not None:
            # The visits right before and right after, which are plain: a round alternates.
            plain = [s for near in visits[index - 1 : index + 2 : 2] for s in near.seconds]
            ratios.setdefault(visit.budget, []).append(median(visit.seconds) / median(plain))
    return {budget: median(values) for budget, values in ratios.items()}


def monotone(ratios: Mapping[Budget, float]) -> dict[Budget, float]:
    """The ratios with no budget above a larger one, nor any below 1.

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
    """Whether a budget is at most as large as another of its source, in nodes and in depth."""
    return (
        small.source == large.source and small.nodes <= large.nodes and small.depth <= large.depth
    )


def time_steps(target: Target, drafter: Drafter, request: Request, rule: Verifier) -> StepSeconds:
    """Seconds of a step under `rule`, plain and for those of the drafter's budgets that may win.

    `request` is what the steps serve; its answers must not end. Takes 2 to 10 seconds, more where
    single steps are slow. Most of the time goes to tree sizes that could still win, by the
    acceptance that the drafter expects.
    """
    tokens = expected_tokens(drafter)

    def run_round(this_round: Round) -> None:
        """Each round after the same prompts, in a fresh cache."""
        make_steps(target, drafter, request, rule, this_round)

    return seconds_by_budget(time_in_rounds(tokens, run_round, TIMING_SETTINGS))


def make_steps(
    target: Target, drafter: Drafter, request: Request, rule: Verifier, this_round: Round
) -> None:
    """Decode as many steps as a round has, whatever limits the request has."""
    most = max(budget.nodes for budget in drafter.budgets)  # a path has no more
    limit = this_round.steps * most + 1
    longer = replace(request, limits=[limit] * len(request.prompts))
    run = BatchRun(longer, target.device)
    stepper = stepper_for(target, run, drafter.features, rule, most)
    steps = decode(stepper, drafter, this_round)
    next(steps)  # the prompt
    # The bar shows when it takes longer than a few seconds.
    for _ in trange(this_round.steps, desc="timing steps", unit="step", delay=3, leave=False):
        next(steps)
