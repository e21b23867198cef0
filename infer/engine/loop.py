"""The decoding loop: read the prompts, then one step after the other until every row has ended."""

from collections.abc import Callable, Iterator

import torch

from drafthead.core.drafting.drafter import Drafter, DraftSession
from drafthead.infer.engine.batch_run import Emitted
from drafthead.infer.engine.prefill import ReadState
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.planning.planner import NO_DRAFTS, Planner


class Decoding:
    """A batch at work: its stepper, its drafter's session, and the planner of its steps.

    Iterating over it decodes the batch, and gives what each pass of the target adds to each row.
    """

    session: DraftSession  # once the prompts are read

    def __init__(
        self,
        stepper: Stepper,
        drafter: Drafter,
        planner: Planner,
        recall: Callable[[], ReadState | None],
    ):
        """`recall` returns what was read of the beginning of all prompts; `begin` uses it up."""
        self.stepper, self.drafter, self.planner = stepper, drafter, planner
        self.recall = recall
        self.run = stepper.run

    def __iter__(self) -> Iterator[Emitted]:
        yield self.run.refuse_failed(self.begin())
        while self.run.running:
            yield self.run.refuse_failed(self.step())

    @torch.no_grad()
    def begin(self) -> Emitted:
        """Read the prompts; returns the first token of each row."""
        past = self.recall()
        with self.run.stats.phase("prefill"):
            self.session, emitted = self.stepper.begin(self.drafter, past)
        return emitted

    @torch.no_grad()
    def step(self) -> Emitted:
        """Verify in one pass what the planner keeps of the drafts that it asks for.

        Where nothing may draft for any row, the planner only learns of the end.
        """
        run = self.run
        planner = self.planner if run.wants_drafts else NO_DRAFTS
        # The clock starts before the draft: a size is judged by all that it costs.
        with run.stats.step() as elapsed:
            if self.stepper.ahead is None:
                run.begin_random_step()  # once, whatever is drafted: its numbers are this step's
                planner.meet(run.num_rows, run.columns, run.sampling, run.mix)
            emitted = self.stepper.step(self.session, planner)
            planner.learn(run.last_lengths, elapsed())
            # Only at the end of a batch is anything written to the disk.
            if not run.running:
                self.planner.finish()
        return emitted
