"""The decoding loop: how large a tree, one step, what it taught; until every row has ended."""

from collections.abc import Iterator

import torch

from drafthead.heads.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.infer.engine.batch_run import Emitted
from drafthead.infer.engine.past import Past
from drafthead.infer.engine.planner import Planner
from drafthead.infer.engine.prompt_groups import rows_of_passes
from drafthead.infer.engine.stepper import Stepper


@torch.no_grad()
def decode(
    stepper: Stepper, drafter: Drafter, planner: Planner, past: Past | None = None
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
    stepper: Stepper, drafter: Drafter, past: Past | None = None
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
            session = started(drafter, stepper.prompt_ids, stepper.prompt_lengths, committed)
        stepper.keep_active(session)
    return session, emitted


def started(
    drafter: Drafter,
    ids: torch.Tensor,  # [B, T] right-padded prompts
    lengths: torch.Tensor,  # [B]
    committed: Committed,  # of the pass over them
) -> DraftSession:
    """A session that has read the prompts, those of similar length together.

    Where one prompt has 900 tokens and fifteen have 100, a drafter would read 14,400 positions with
    padding, and 2,400 so.
    """
    groups = rows_of_passes(lengths, alone=False)
    if len(groups) == 1:
        session = drafter.start(ids, lengths)
        session.commit(committed)
        return session
    parts = []
    for group in groups:
        part = committed.of_rows(group)
        assert part.width is not None
        parts.append(drafter.start(ids[group, : part.width], lengths[group]))
        parts[-1].commit(part)
    session, *others = parts
    for number, other in enumerate(others, start=1):
        session.join_rows(other, range(sum(map(len, groups[: number + 1]))))
    back = torch.tensor([row for group in groups for row in group]).argsort()
    session.keep_rows(back.to(lengths.device))
    return session


def next_step(stepper: Stepper, session: DraftSession, planner: Planner) -> Emitted:
    """One step of the size that the planner chooses."""
    run = stepper.run
    with run.stats.step() as elapsed:
        budget = planner.choose(session.outlook())
        emitted = stepper.step(session, budget)
        made = None if budget is None else session.drafted(budget)
        planner.learn(made, run.last_lengths, elapsed())
        if not run.batch.running:
            planner.finish()
    return emitted
