"""Methods of decoding: the drafter, the rule and the planner that the steps of batches share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer.beams.beam_search import BeamStepper
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.loop import Decoding
from drafthead.infer.engine.prefill import ReadState
from drafthead.infer.engine.stepper import Stepper, Watch, steps_in_one_call
from drafthead.infer.planning.agreed_plan import AgreedPlan
from drafthead.infer.planning.planner import FixedPlan, Planner
from drafthead.infer.request.request import Request
from drafthead.infer.scheduling.past import Memory, Past
from drafthead.infer.verifiers import Verifier, verifier_for


@dataclass(frozen=True)
class Method:
    """The method of requests whose rows can share a batch."""

    target: Target
    drafter: Drafter
    rule: Verifier
    planner: Planner
    most_nodes: int  # of a tree
    memory: Memory | None = None

    def stepper(self, run: BatchRun, watch: Watch | None = None) -> Stepper:
        """The stepper of a batch; `watch` is explained at `Stepper`."""
        kind = Stepper if run.request.beams is None else BeamStepper
        return kind(self.target, run, self.drafter.features, self.rule, self.most_nodes, watch)

    def decoding(
        self,
        run: BatchRun,
        recall: Callable[[], ReadState | None] | None = None,
        watch: Watch | None = None,
    ) -> Decoding:
        """A batch to decode; by default `recall` finds what is remembered of its prompts."""
        recall = recall or partial(self.recall, run)
        return Decoding(self.stepper(run, watch), self.drafter, self.planner, recall)

    def recall(self, run: BatchRun) -> Past | None:
        """The remembered beginning of all prompts of a batch."""
        if self.memory is None:
            return None
        with run.stats.phase("prefill"):
            return self.memory.recall(run.request.prompts, self.drafter, run.request.cache_salt)

    def read(self, run: BatchRun, past: Past | None) -> Past:
        """The past of a batch of one prompt that is read after `past`, and not answered."""
        decoding = self.decoding(run, lambda: past)
        decoding.begin()
        cache, [prompt] = decoding.stepper.cache, run.request.prompts
        return Past(cache, decoding.session, prompt, drafter=self.drafter)


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
