"""Look-up in a datastore: trees of what the target has said before after the same words.

The row's own past goes first, as in prompt lookup; the rest of the tree is for what followed in the
datastore. It needs no training and next to no time, so it pays wherever a target answers many
requests of a kind.
"""

from collections.abc import Sequence

import torch

from drafthead.heads.coupling import Choice
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.host import to_host
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.trees.static import tree_budgets
from drafthead.heads.trees.tree import PADDING, Budget, TokenTree
from drafthead.infer.drafters.datastore import DEPTH, Datastore
from drafthead.infer.drafters.guess_tree import Counted, GuessTree
from drafthead.infer.drafters.past import Past, Pasts

OWN = 8  # tokens that the row's own past proposes
LEAST_NGRAM = 2  # tokens that must have occurred in it before; one alone says too little


class StoreLookup(Drafter):
    """Trees from the row's own past and from a datastore."""

    features = FeatureSpec(layers=(), last=False)
    depth = DEPTH
    budgets = tree_budgets(DEPTH)

    def __init__(self, store: Datastore):
        self.store = store

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """As measured when the datastore was built, on texts that are not in it."""
        reached = self.store.record.reached
        sizes = [nodes for nodes in reached if nodes <= budget.nodes]
        if not sizes:
            return super().chances(budget)
        return tuple(reached[max(sizes)][: budget.depth])

    def guess(self, past: Past, nodes: int, depth: int) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's past."""
        counted = Counted.of(self.store.continuations(past.tokens))
        own = past.continuation(OWN, LEAST_NGRAM)
        return GuessTree.grown(own, counted, nodes, depth)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> "StoreLookupSession":
        """A session with the first tokens of prompts [B, T]; the others come with commits."""
        return StoreLookupSession(self, to_host(prompts[:, 0]))


class StoreLookupSession(Pasts):
    """A datastore at work."""

    def __init__(self, drafter: StoreLookup, first_tokens: Sequence[int]):
        super().__init__(first_tokens)
        self.drafter = drafter

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """Each row's own tree; the root alone if there is nothing to guess."""
        trees = [self.drafter.guess(past, budget.nodes - 1, budget.depth) for past in self.pasts]
        roots = [past.tokens[-1] for past in self.pasts]
        return token_tree(roots, trees, self.device)

    def offers(self) -> bool:
        """Whether there is anything to propose for any row."""
        store = self.drafter.store
        return any(
            past.continuation(1, LEAST_NGRAM) or any(True for _ in store.continuations(past.tokens))
            for past in self.pasts
        )


def token_tree(roots: Sequence[int], trees: Sequence[GuessTree], device: torch.device) -> TokenTree:
    """Trees of different sizes as one batch; what is missing is padding under the root."""
    most = max(len(tree.tokens) for tree in trees)
    tables = []
    for root, tree in zip(roots, trees, strict=True):
        missing = most - len(tree.tokens)
        tables.append(
            [[root, *tree.tokens, *[PADDING] * missing], [-1, *tree.parents, *[0] * missing]]
        )
    tokens, parents = torch.tensor(tables).to(device).unbind(1)  # one copy to the device
    deepest = max((max(tree.depths, default=0) for tree in trees), default=0)
    return TokenTree.from_parents(tokens, parents, deepest, most)
