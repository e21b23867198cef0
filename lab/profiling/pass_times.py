"""Passes alone: one pass of the target, or one proposal of a drafter, outside the loop of steps."""

from collections.abc import Callable, Sequence

import torch

from drafthead.core.drafting.drafter import Committed, Drafter
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
GREEDY = SamplingConfig()


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


def proposal_alone(
    drafter: Drafter, budget: Budget, stepper: Stepper, prompt: Committed
) -> Callable[[], TokenTree]:
    """A greedy proposal after one newly committed token, ready to be called.

    Its session has read the prompt, and what the drafter computes of it is not part of the call.
    """
    session = drafter.start(stepper.prompt_ids, stepper.prompt_lengths)
    session.commit(prompt)
    session.propose(budget, GREEDY, None)  # reads the rest of the prompt, if any
    ones = torch.ones_like(prompt.lengths)
    session.commit(Committed(prompt.tokens, prompt.features, ones, width=1, cache=stepper.cache))
    return lambda: known(session.propose(budget, GREEDY, None))


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
