"""The decoding loop: how large a tree, one step, what it taught; until every row has ended."""

from collections.abc import Iterator

import torch

from drafthead.heads.drafting.drafter import Drafter, DraftSession
from drafthead.infer.engine.batch_run import Emitted
from drafthead.infer.engine.planner import Planner
from drafthead.infer.engine.stepper import Stepper


@torch.no_grad()
def decode(stepper: Stepper, drafter: Drafter, planner: Planner) -> Iterator[Emitted]:
    """Decode a batch; yields what each pass of the target adds to each row."""
    run = stepper.run
    session, emitted = read_prompts(stepper, drafter)
    yield run.refuse_failed(emitted)
    while run.batch.running:
        yield run.refuse_failed(next_step(stepper, session, planner))


def read_prompts(
    stepper: Stepper, drafter: Drafter, session: DraftSession | None = None
) -> tuple[DraftSession, Emitted]:
    """The pass over the prompts: the drafter's session, and the first token of each row.

    `session` is one that knows as much of the prompts as the stepper's cache.
    """
    with stepper.run.stats.phase("prefill"):
        committed, emitted = stepper.prefill()
        session = session or drafter.start(stepper.prompt_ids, stepper.prompt_lengths)
        session.commit(committed)
        stepper.keep_active(session)
    return session, emitted


def next_step(stepper: Stepper, session: DraftSession, planner: Planner) -> Emitted:
    """One step of the size that the planner chooses."""
    run = stepper.run
    with run.stats.step() as elapsed:
        budget = planner.choose()
        emitted = stepper.step(session, budget)
        planner.learn(budget, run.last_lengths, elapsed())
        if not run.batch.running:
            planner.finish()
    return emitted
