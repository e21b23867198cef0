"""How batches are decoded: the drafter, the rule and the planner that all their steps share."""

from collections.abc import Iterator
from dataclasses import dataclass

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.target.target import Target
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.graph_stepper import stepper_for
from drafthead.infer.engine.loop import decode
from drafthead.infer.engine.planner import Planner
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.verifiers import Verifier


@dataclass(frozen=True)
class Method:
    """What decodes requests that differ in nothing but prompts, limits, seeds and stops."""

    target: Target
    drafter: Drafter
    rule: Verifier
    planner: Planner
    most_nodes: int  # of a tree

    def stepper(self, run: BatchRun) -> Stepper:
        """What makes a batch's steps: graphs if the target is compiled and the rule allows it."""
        return stepper_for(self.target, run, self.drafter.features, self.rule, self.most_nodes)

    def decode(self, run: BatchRun) -> Iterator[Emitted]:
        """Decode a batch; yields what each pass of the target adds to each row."""
        return decode(self.stepper(run), self.drafter, self.planner)
