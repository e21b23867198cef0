"""A drafter whose trees have a branch from lookup, wherever the row's past has one to offer.

A head cannot know long names and numbers of the prompt, and prompt lookup knows nothing else. Half
of a tree's nodes cost a head little; they buy a chain as long as the text that is repeated, or the
best of what a datastore knows. And where lookup has found much again, a tree of lookup alone costs
no pass of a head at all: the planner learns when that is better (suffix decoding, Oliaro et al.,
2024, arXiv 2411.04975, decides it by a threshold).
"""

from itertools import zip_longest

import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import NO_OUTLOOK, Committed, Drafter, DraftSession
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.trees.recipe import TreeRecipe
from drafthead.heads.trees.static import TREE_SIZES
from drafthead.heads.trees.tree import Budget, TokenTree
from drafthead.infer.drafters.past import Lookup
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import LEAST_NGRAM, StoreLookup

LOOKUP = "lookup"  # the source of trees of lookup alone


class WithLookup(Drafter):
    """A drafter, and lookup beside it: in the row's own past, and in a datastore if there is one.

    Only under rules that follow the target's own tokens does lookup take part: copied tokens are
    not drawn, and whether there are any depends on the other rows of a batch.
    """

    def __init__(self, drafter: Drafter, stored: StoreLookup | None = None):
        self.drafter = drafter
        self.features = drafter.features
        least = drafter.budgets[0].nodes
        self.own_budgets = {with_branch(budget, least): budget for budget in drafter.budgets}
        most = max(budget.nodes for budget in self.own_budgets)
        self.lookup: Lookup = stored or PromptLookup(most - 1, LEAST_NGRAM)
        deepest = self.lookup.budgets[-1].depth
        alone = [Budget(n, min(n - 1, deepest), LOOKUP) for n in TREE_SIZES if n <= most]
        self.budgets = (*alone, *self.own_budgets)

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """Those of the drafter, as what lookup adds depends on the text; or those of lookup."""
        if budget.source == LOOKUP:
            return self.lookup.chances(budget)
        return self.drafter.chances(self.own_budget(budget))

    def chances_at(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """Those of the drafter or of the branch, whichever is higher at a depth."""
        if budget.source == LOOKUP:
            return self.lookup.chances_at(outlook, budget)
        own = self.chances(budget)
        nodes = branch_nodes(self.own_budget(budget))
        if outlook == NO_OUTLOOK or nodes == 0:
            return own
        branch = self.lookup.chances_at(outlook, Budget(nodes + 1, nodes))
        return tuple(max(pair) for pair in zip_longest(own, branch, fillvalue=0.0))

    def own_budget(self, budget: Budget) -> Budget:
        """What the drafter may use of a budget where there is no branch."""
        depth = min(self.drafter.budgets[-1].depth, budget.nodes - 1)
        return self.own_budgets.get(budget, Budget(budget.nodes, depth))

    def identity(self) -> str:
        """That of the drafter, and that there is a branch."""
        return f"{self.drafter.identity()} with {self.lookup.identity()}"

    def compile(self) -> None:
        """Compile the drafter."""
        self.drafter.compile()

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session of both for prompts [B, T] of lengths [B]."""
        return LookupBranch(self, prompts, lengths)


class LookupBranch(DraftSession):
    """A session whose trees are grafted with what lookup offers."""

    row_state = ("session", "lookup")

    def __init__(self, drafter: WithLookup, prompts: torch.Tensor, lengths: torch.Tensor):
        """For prompts [B, T] of lengths [B]."""
        self.drafter = drafter
        self.session = drafter.drafter.start(prompts, lengths)
        self.lookup = drafter.lookup.start(prompts, lengths)

    def commit(self, committed: Committed) -> None:
        """Both learn it."""
        self.session.commit(committed)
        self.lookup.commit(committed)

    def recipe(self, budget: Budget, draws: NextDraws | None) -> TreeRecipe | None:
        """The drafter's own, where lookup has no part in the tree."""
        if budget.source == LOOKUP or self.has_branch(budget):
            return None
        return self.session.recipe(self.drafter.own_budget(budget), draws)

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """The drafter's tree, half of it replaced by the branch if there is one, or lookup's."""
        if budget.source == LOOKUP:
            return self.lookup.propose(budget, sampling, random)
        follows = sampling.greedy or isinstance(random, NextDraws)
        own = self.drafter.own_budget(budget)
        if not follows or not self.has_branch(budget):
            return self.session.propose(own, sampling, random)
        nodes = budget.nodes - branch_nodes(own)
        left = Budget(nodes, min(own.depth, nodes - 1), own.source)
        tree = self.session.propose(left, sampling, random)
        more = budget.nodes - tree.num_nodes
        branch = self.lookup.propose(Budget(more + 1, more), sampling, random)
        return grafted(tree, branch)

    def outlook(self) -> int:
        """That of lookup."""
        return self.lookup.outlook()

    def has_branch(self, budget: Budget) -> bool:
        """Whether the budget has room for a branch, and lookup something to offer for any row."""
        return branch_nodes(self.drafter.own_budget(budget)) > 0 and self.lookup.offers()


def branch_nodes(budget: Budget) -> int:
    """Nodes of a tree that a branch may take: half of them, and none of a tree of two or three."""
    return budget.nodes // 2 if budget.nodes > 3 else 0


def with_branch(own: Budget, least: int) -> Budget:
    """What a drafter's own budget becomes when a branch may take half of its nodes.

    A drafter that cannot draft so few, because its trees have at least so many nodes, keeps all of
    them, and the branch comes on top.
    """
    branch = branch_nodes(own)
    nodes = own.nodes if own.nodes - branch >= least else own.nodes + branch
    return Budget(nodes, max(own.depth, branch), own.source)


def grafted(tree: TokenTree, branch: TokenTree) -> TokenTree:
    """Two trees with the same roots as one: the nodes of the branch come last, but for its root.

    A chain x y under the root of a tree with parents (-1, 0, 1) makes the parents
    (-1, 0, 1, 0, 3). Tokens may be in both: the rules that follow the target's own tokens then take
    the longer of both paths.
    """
    nodes, more = tree.num_nodes, branch.num_nodes - 1
    parents = branch.parents[:, 1:]
    rows, device = len(parents), parents.device
    ancestors = torch.zeros(rows, nodes + more, nodes + more, dtype=torch.bool, device=device)
    ancestors[:, :nodes, :nodes] = tree.ancestors
    ancestors[:, nodes:, 0] = True
    ancestors[:, nodes:, nodes:] = branch.ancestors[:, 1:, 1:]
    return TokenTree(
        torch.cat([tree.tokens, branch.tokens[:, 1:]], dim=1),
        torch.cat([tree.parents, torch.where(parents > 0, parents + nodes - 1, 0)], dim=1),
        torch.cat([tree.depths, branch.depths[:, 1:]], dim=1),
        ancestors,
        max(tree.max_depth, branch.max_depth),
        tree.width + branch.width,
    )
