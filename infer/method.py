"""How batches are decoded: the drafter, the rule and the planner that all their steps share."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.loop import decode, read_prompts
from drafthead.infer.engine.stepper import Stepper, steps_in_one_call
from drafthead.infer.past import Memory, Past
from drafthead.infer.planning.agreed_plan import AgreedPlan
from drafthead.infer.planning.planner import FixedPlan, Planner
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers import Verifier, verifier_for


@dataclass(frozen=True)
class Method:
    """What decodes requests whose rows can share a batch."""

    target: Target
    drafter: Drafter
    rule: Verifier
    planner: Planner
    most_nodes: int  # of a tree
    memory: Memory | None = None

    def stepper(self, run: BatchRun) -> Stepper:
        """What makes a batch's steps."""
        return Stepper(self.target, run, self.drafter.features, self.rule, self.most_nodes)

    def decode(self, run: BatchRun) -> Iterator[Emitted]:
        """Decode a batch; yields what each pass of the target adds to each row."""
        # Lazy: what is remembered is copied when the first pass is asked for.
        yield from decode(self.stepper(run), self.drafter, self.planner, self.recall(run))

    def recall(self, run: BatchRun) -> Past | None:
        """What is remembered of the beginning of all prompts of a batch."""
        if self.memory is None:
            return None
        with run.stats.phase("prefill"):
            return self.memory.recall(run.request.prompts, self.drafter, run.request.cache_salt)

    @torch.no_grad()
    def read(self, run: BatchRun, past: Past | None) -> Past:
        """The past of a batch of one prompt that is read after `past`, and not answered."""
        stepper = self.stepper(run)
        session, _ = read_prompts(stepper, self.drafter, past)
        return Past(stepper.cache, session, run.request.prompts[0])


def planner_of(run: BatchRun, target: Target, own: Planner) -> Planner:
    """A process's `own` planner for a batch, or where several share the target that of all of them.

    Raises UserError for an answer that is to end by the clock, which each of them has for itself.
    """
    if not target.is_shared:
        return own
    if run.request.max_time is not None:
        raise UserError("max_time cannot be combined with a target that several processes share")
    return own if isinstance(own, FixedPlan) else AgreedPlan(own)


def rule_of(request: Request, target: Target, drafter: Drafter | None) -> Verifier:
    """The acceptance rule that a request names.

    Only where it follows the target's own tokens can rows of one batch be drafted for differently.
    """
    follows = steps_in_one_call(target, request) or request.drafts is not None
    default = "match" if follows or drafter is None else drafter.sampling_rule
    rule = verifier_for(request.verifier, request.sampling.temperature, default)
    return rule.with_options(request.rule_options)
