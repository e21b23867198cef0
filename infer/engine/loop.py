"""The decoding loop: how large a tree, one step, what it taught; until every row has ended."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from drafthead.core.drafting.drafter import Drafter, DraftSession
from drafthead.core.target.tree_cache import TreeCache
from drafthead.infer.engine.batch_run import Emitted
from drafthead.infer.engine.prefill import prefill_drafter
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.planning.planner import NO_DRAFTS, Planner


@dataclass(frozen=True)
class Known:
    """What the target and the drafter know of the beginning of all prompts of a batch."""

    cache: TreeCache
    session: DraftSession


@torch.no_grad()
def decode(
    stepper: Stepper, drafter: Drafter, planner: Planner, past: Known | None = None
) -> Iterator[Emitted]:
    """Decode a batch; yields what each pass of the target adds to each row.

    `past` is explained at `read_prompts`.
    """
    run = stepper.run
    session, emitted = read_prompts(stepper, drafter, past)
    yield run.refuse_failed(emitted)
    while run.batch.running:
        yield run.refuse_failed(next_step(stepper, session, planner))


def read_prompts(
    stepper: Stepper, drafter: Drafter, past: Known | None = None
) -> tuple[DraftSession, Emitted]:
    """The pass over the prompts: the drafter's session, and the first token of each row.

    `past` is what was read of the beginning of all of them; it is used up.
    """
    with stepper.run.stats.phase("prefill"):
        if past is not None:
            stepper.cache = past.cache
        committed, emitted = stepper.prefill()
        if past is not None:
            session = past.session
            session.commit(committed)
        else:
            session = prefill_drafter(
                drafter, stepper.prompt_ids, stepper.prompt_lengths, committed
            )
        # Answers of one token have ended already.
        stepper.keep_active(session)
    return session, emitted


def next_step(stepper: Stepper, session: DraftSession, planner: Planner) -> Emitted:
    """One step, which verifies what the planner keeps of the drafts that it asks for.

    Where nothing may draft for any row it is told of nothing but the end.
    """
    run, plans = stepper.run, planner
    planner = plans if run.wants_drafts else NO_DRAFTS
    # The clock starts before the draft: a size is judged by all that it costs.
    with run.stats.step() as elapsed:
        if stepper.ahead is None:
            run.begin_random_step()  # once, whatever is drafted: its numbers are those of this step
            planner.meet(run.rows, run.columns, run.sampling, run.mix)
        emitted = stepper.step(session, planner)
        planner.learn(run.last_lengths, elapsed())
        # Only at the end of a batch is anything written to the disk.
        if not run.batch.running:
            plans.finish()
    return emitted
