"""Steps that are one compiled graph each, and where they can be taken."""

from functools import cached_property

import torch

from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.heads.trees.recipe import Proposal, TokenFiller, TreeRecipe, known
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.graph_step import Draws, GraphStep
from drafthead.infer.engine.stepper import EagerStepper, Outcome, Stepper
from drafthead.infer.verifiers import Verifier


class GraphStepper(Stepper):
    """Steps under rules that accept the target's own tokens, each in one graph.

    The graph computes the pass, the verdict and the moves in the cache, and the tokens of the tree
    as well where the session proposes a recipe.
    """

    def verified(self, proposal: Proposal | None) -> Outcome:
        """Call the graph of a recipe, or of a tree whose tokens are known."""
        if isinstance(proposal, TreeRecipe):
            recipe = proposal
        else:
            recipe = TreeRecipe.of(self.root_alone() if proposal is None else known(proposal))
        self.run.stats.verified_nodes += recipe.num_nodes
        with self.run.stats.phase("verify"):
            draws = self.draws(recipe.max_depth)
            step = self.step_function(recipe.filler)
            return step(recipe, self.cache, draws, self.run.request.sampling.whole)

    def step_function(self, filler: TokenFiller) -> GraphStep:
        """The steps of the target that fill their trees like this, made once."""
        known, key = self.target.functions, (self.features, filler)
        if key not in known:
            # Not replaced, should another thread have been quicker: graphs are made only once.
            known.setdefault(key, GraphStep(self.target, *key))
        found: GraphStep = known[key]
        return found

    @cached_property
    def settings(self) -> torch.Tensor:
        """The request's sampling as `SamplingConfig.settings` [4]."""
        return self.run.request.sampling.settings(self.target.device)

    def draws(self, depth: int) -> Draws | None:
        """What the target's own tokens are drawn with, the same numbers as in plain decoding."""
        if self.run.random is None:
            return None
        return Draws(self.settings, self.run.random.ahead(depth + 1))


def stepper_for(
    target: Target,
    run: BatchRun,
    features: FeatureSpec,
    verifier: Verifier,
    max_nodes: int = 1,
) -> Stepper:
    """The quickest stepper for a target, a request and a rule; arguments as for `Stepper`."""
    # A graph hands out no logits. The rule stays the same, so that a record changes no text.
    can_be_a_graph = can_step_in_graphs(target, run) and verifier.follows and run.record is None
    stepper = GraphStepper if can_be_a_graph else EagerStepper
    return stepper(target, run, features, verifier, max_nodes)


def can_step_in_graphs(target: Target, run: BatchRun) -> bool:
    """Whether steps under rules that follow the target are graphs for this target and request."""
    return target.backend.compiles and run.request.samples_in_graphs
