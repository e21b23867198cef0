"""The decoding loop: propose a tree, verify it in one pass of the target, commit the path."""

from collections.abc import Iterator

import torch

from drafthead.heads.drafting.drafter import Drafter, DraftSession
from drafthead.heads.sampling import RowRandom
from drafthead.heads.trees.tree import Budget
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.plain import plain_step
from drafthead.infer.engine.planner import Planner
from drafthead.infer.verifiers import Verifier


@torch.no_grad()
def speculate(
    run: BatchRun, drafter: Drafter, planner: Planner, verifier: Verifier
) -> Iterator[Emitted]:
    """Decode with a drafter; yields what each pass of the target gives."""
    draws = run.random if verifier.draws_children else None
    with run.stats.phase("prefill"):
        committed, emitted = run.prefill()
        session = drafter.start(run.prompt_ids, run.prompt_lengths)
        session.commit(committed)
        run.keep_active(session)
    yield emitted
    while run.batch.running:
        with run.stats.step() as elapsed:
            budget = planner.choose()
            if budget is None:
                emitted = plain_step(run, session)
            else:
                emitted = step(run, session, budget, verifier, draws)
            planner.learn(budget, run.last_lengths, elapsed())
        yield emitted


def step(
    run: BatchRun,
    session: DraftSession,
    budget: Budget,
    verifier: Verifier,
    draws: RowRandom | None,
) -> Emitted:
    """Propose, verify, commit."""
    stats = run.stats
    with stats.phase("draft"):
        run.begin_random_step()
        recipe = session.recipe(budget) if run.graphs_of(verifier) else None
        drafted = recipe or session.propose(budget, run.request.draft_sampling, draws)
    stats.verified_nodes += drafted.num_nodes
    outcome = run.judge(drafted, verifier)
    with stats.phase("commit"):
        run.commit(outcome)
        session.commit(outcome.committed())
        emitted = run.take_step(outcome.answers)
        run.keep_active(session)
    return emitted
