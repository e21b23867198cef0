"""Passes alone: the time of target and drafter outside the engine.

Everything is timed in turns, so that a machine that slows down slows all of it down.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from tqdm import trange

from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target, TargetOutput
from drafthead.core.trees.recipe import known
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers import VERIFIERS

COMMITTED = 256  # cache columns before a pass
PASS_SIZES = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 9
WARM_UP = 3  # calls of each kind that are not counted: they compile, allocate, fill caches

GREEDY = SamplingConfig()
Key = TypeVar("Key")


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds from the call until the device has finished what it started."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has finished when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class PassTimes:
    """Median seconds of passes alone, after `columns` committed positions in each of `batch` rows.

    `verify[n]` is a pass of the target over n new nodes a row, `draft[budget]` one proposal.
    """

    batch: int
    columns: int
    verify: dict[int, float]
    draft: dict[Budget, float]


@torch.no_grad()
def time_passes(
    target: Target,
    drafter: Drafter | None = None,
    batch: int = 1,
    sizes: Sequence[int] = PASS_SIZES,
    rounds: int = ROUNDS,
) -> PassTimes:
    """Time the target at `sizes` and the drafter at its sizes.

    The text is `COMMITTED` random tokens, or as many as the context holds. A proposal follows one
    newly committed token, whose commit is not timed.
    """
    stepper, prompt = after_random_text(target, drafter, batch, max(sizes))
    passes = {nodes: pass_alone(stepper, nodes) for nodes in sizes}
    verify: dict[int, list[float]] = {nodes: [] for nodes in sizes}
    budgets = paid_budgets(drafter) if drafter else ()
    draft: dict[Budget, list[float]] = {budget: [] for budget in budgets}
    for _ in trange(WARM_UP + rounds, desc="passes alone", unit="round", leave=False):
        for nodes, call in passes.items():
            verify[nodes].append(seconds_of(call, target.device))
        if drafter is not None:
            for budget, propose in proposals_alone(drafter, budgets, stepper, prompt):
                draft[budget].append(seconds_of(propose, target.device))
    return PassTimes(batch, stepper.cache.longest, medians(verify), medians(draft))


def after_random_text(
    target: Target, drafter: Drafter | None, batch: int, max_nodes: int
) -> tuple[Stepper, Committed]:
    """A greedy stepper that has read random text in each of `batch` rows, and what it committed."""
    columns = min(COMMITTED, target.max_length or COMMITTED)
    features = drafter.features if drafter else FeatureSpec(layers=(), last=False)
    text = torch.randint(
        target.vocab_size, (batch, columns), generator=torch.Generator().manual_seed(0)
    )
    stepper = greedy_stepper(target, endless(text.tolist(), 1), features, max_nodes)
    return stepper, stepper.prefill()[0]


def proposals_alone(
    drafter: Drafter, budgets: Sequence[Budget], stepper: Stepper, prompt: Committed
) -> Iterator[tuple[Budget, Callable[[], TokenTree]]]:
    """For each budget a proposal after one newly committed token, ready to be called.

    All in one session that has read the prompt: call each before the next is asked for.
    """
    session = drafter.start(stepper.prompt_ids, stepper.prompt_lengths)
    session.commit(prompt)
    session.propose(budgets[0], GREEDY, None)  # reads the rest of the prompt, if any
    ones = torch.ones_like(prompt.lengths)
    one = Committed(prompt.tokens, prompt.features, ones, width=1, cache=stepper.cache)
    for budget in budgets:
        session.commit(one)
        yield budget, partial(proposed, session, budget)


def paid_budgets(drafter: Drafter) -> list[Budget]:
    """The sizes of a drafter that cost passes; all of them where none does."""
    return [size for size in drafter.budgets if size.depth or not drafter.budgets[-1].depth]


def proposed(session: DraftSession, budget: Budget) -> TokenTree:
    """A greedy proposal, with its tokens."""
    return known(session.propose(budget, GREEDY, None))


def endless(prompts: Sequence[Sequence[int]], limit: int) -> Request:
    """A greedy request whose answers end only at their limit."""
    rows = len(prompts)
    return Request(prompts=prompts, limits=[limit] * rows, seeds=[0] * rows, sampling=GREEDY)


def greedy_stepper(
    target: Target, request: Request, features: FeatureSpec, max_nodes: int
) -> Stepper:
    """The engine's stepper for a greedy request."""
    run = BatchRun(request, target.device)
    return Stepper(target, run, features, VERIFIERS["greedy"], max_nodes)


def pass_alone(stepper: Stepper, nodes: int) -> Callable[[], TargetOutput]:
    """A pass over a chain of `nodes` tokens after the committed text, ready to be called.

    Mask and positions are made here, outside the pass, and the pass commits nothing.
    """
    target, cache, features = stepper.target, stepper.cache, stepper.features
    assert cache.lengths is not None
    device = target.device
    steps = torch.arange(nodes, device=device)
    tokens = stepper.roots[:, None].expand(-1, nodes).contiguous()
    positions = target.legal_positions(cache.lengths[:, None] + steps)
    mask = target.tree_mask(cache, (steps[:, None] >= steps)[None])
    return lambda: target.run(tokens, positions, mask, features, cache)


def medians(taken: dict[Key, list[float]]) -> dict[Key, float]:
    """Median of each list of seconds, without the warm-up."""
    return {key: median(seconds[WARM_UP:]) for key, seconds in taken.items()}
