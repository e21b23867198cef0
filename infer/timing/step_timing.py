"""Real steps of the engine, timed for each size of tree, on purpose and before decoding.

Decoding learns these times by itself; this is for servers that want to know them first, and for
tables. Background load can make a step 1.5 times as long from one second to the next. So every
size is timed between plain steps, as a multiple of these.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from threading import Lock

from tqdm import trange

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import Proposal
from drafthead.core.trees.tree import Budget
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.planning.draft_acceptance import Size
from drafthead.infer.planning.planner import Planner, Propose
from drafthead.infer.planning.step_costs import StepCosts
from drafthead.infer.request.request import Request
from drafthead.infer.scheduling.method import Method
from drafthead.infer.timing.plans import Plans, StepKind
from drafthead.infer.verifiers import Verifier

TIMING = Lock()  # two timings at once would measure each other
# Random tokens before the first timed step. Short, as most prompts are: attention over a long text
# would be a larger part of the steps.
PROMPT_TOKENS = 64
# Largest number of visits to a size. They lie some time apart, as other load comes in bursts.
ROUNDS = 10
# Seconds of timed steps after which only sizes are visited that were not and could still win.
ENOUGH_SECONDS = 6
# Share of the best size's tokens per second that a size must promise to be visited again.
CONTENDER_SHARE = 0.8
# Steps of a visit that are not timed, since the CPU caches hold another size's data, and all steps.
UNTIMED_STEPS, VISIT_STEPS = 2, 5


class Visits(Planner):
    """Several steps in a row of each size of a list.

    Passes of one size leave their weights in the CPU cache for the next: single steps that take
    turns would each look slower than when decoding goes on with one size.
    """

    def __init__(self, sizes: Sequence[Size], steps: int):
        self.sizes = [size for size in sizes for _ in range(steps)]
        self.seconds: list[float] = []

    def draft(self, propose: Propose, ahead: bool = False) -> Proposal | None:
        size = self.sizes[len(self.seconds)]
        return None if size is None else propose(size)

    def learn(self, accept_lengths: Sequence[int], seconds: float) -> None:
        self.seconds.append(seconds)


def time_sizes(costs: StepCosts, run: Callable[[Visits], object]) -> None:
    """Visit all sizes of `costs` and teach it what they take; `run` makes the steps of visits.

    The first round goes from small to large: with 16 rows a pass over 64 nodes each takes a second,
    and trees of 8 were too dear already. Later rounds time only sizes that could still win, by the
    acceptance that the drafter expects. It takes 2 to 10 seconds, more where steps are slow.
    """
    order = random.Random(0)
    sizes, spent = [size for size in costs.sizes if size is not None], 0.0
    plain: list[float] = []
    ratios: dict[Size, list[float]] = {}
    known: dict[Size, float] = {}
    for _ in range(ROUNDS):
        for size in sizes:
            if spent >= ENOUGH_SECONDS and (size in ratios or size not in contenders(costs)):
                continue
            visits = Visits((None, size, None), VISIT_STEPS)
            run(visits)
            before, took, after = (
                visits.seconds[start + UNTIMED_STEPS : start + VISIT_STEPS]
                for start in range(0, len(visits.seconds), VISIT_STEPS)
            )
            plain += before + after
            ratios.setdefault(size, []).append(median(took) / median(before + after))
            spent += sum(before + took + after)
            known[None] = median(plain)
            known |= {size: known[None] * median(found) for size, found in ratios.items()}
            with costs.lock:
                costs.set_timed(known)
        sizes = contenders(costs)
        order.shuffle(sizes)  # load that comes at intervals does not hit the same ones


def contenders(costs: StepCosts) -> list[Budget]:
    """Sizes that promise nearly as many tokens per second as the best, or as plain decoding.

    Of 1.4, 1.8 and 2 tokens in 1.2, 1.3 and 2 times a plain step the first two reach 0.8.
    """
    plain = costs.seconds(None)
    promised = {
        size: (1 + sum(size.chances)) * plain / costs.seconds(size)
        for size in costs.sizes
        if size is not None
    }
    best = max(promised, key=promised.__getitem__)
    enough = CONTENDER_SHARE * max(1.0, promised[best])
    return [size for size, promise in promised.items() if promise >= enough] or [best]


def make_graphs(costs: StepCosts, make: Callable[[Visits], None]) -> None:
    """A step of each size, so that their graphs are there before a process serves.

    Only of sizes that could win, where all of them would take longer than timing does.
    """
    sizes = [size for size in costs.sizes if size is not None]
    if sum(map(costs.seconds, sizes)) >= ENOUGH_SECONDS:
        sizes = contenders(costs)
    turns = [turn for size in sizes for turn in (None, size)]
    make(Visits(turns, steps=1))


def time_or_visit(plans: Plans, run: BatchRun, rule: Verifier, fresh: bool) -> None:
    """Time the steps of a batch and keep that, or make a step of each size if they were timed.

    With `fresh` they are timed again.
    """
    kind = StepKind.of(run, rule)
    costs = plans.costs(kind)
    make = partial(make_steps, plans.target, plans.drafter, run.request, rule)
    with TIMING:
        if fresh or not costs.was_timed:
            time_sizes(costs, make)
            plans.keep_timed(kind)
        else:
            make_graphs(costs, make)


def make_steps(
    target: Target, drafter: Drafter, request: Request, rule: Verifier, visits: Visits
) -> None:
    """Decode as many steps as visits have, whatever limits the request has."""
    most = max(budget.nodes for budget in drafter.budgets)  # a path has no more
    limit = len(visits.sizes) * most + 1
    longer = replace(request, limits=[limit] * len(request.prompts))
    run = BatchRun(longer, target.device)
    decoding = Method(target, drafter, rule, visits, most).decoding(run)
    decoding.begin()
    # The bar shows when it takes longer than a few seconds.
    for _ in trange(len(visits.sizes), desc="timing steps", unit="step", delay=3, leave=False):
        decoding.step()
