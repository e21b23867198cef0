"""A drafter whose trees have a branch from prompt lookup, wherever the row's past has one to offer.

A head cannot know long names and numbers of the prompt, and prompt lookup knows nothing else. Half
of a tree's nodes cost a head little; they buy a chain as long as the text that is repeated.
"""

import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.trees.recipe import TreeRecipe
from drafthead.heads.trees.tree import PADDING, Budget, TokenTree
from drafthead.infer.drafters.prompt_lookup import PromptLookup

LEAST_NGRAM = 2  # tokens that must have occurred before; one alone says too little


class WithLookup(Drafter):
    """A drafter, and prompt lookup beside it.

    Only under rules that follow the target's own tokens is there a branch: copied tokens are not
    drawn, and whether there are any depends on the other rows of a batch.
    """

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.features = drafter.features
        least = drafter.budgets[0].nodes
        self.own_budgets = {with_branch(budget, least): budget for budget in drafter.budgets}
        self.budgets = tuple(self.own_budgets)
        self.lookup = PromptLookup(max(1, max(map(branch_nodes, drafter.budgets))))

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """Those of the drafter alone; what lookup adds depends on the text."""
        return self.drafter.chances(self.own_budget(budget))

    def own_budget(self, budget: Budget) -> Budget:
        """What the drafter may use of a budget where there is no branch."""
        depth = min(self.drafter.budgets[-1].depth, budget.nodes - 1)
        return self.own_budgets.get(budget, Budget(budget.nodes, depth))

    def identity(self) -> str:
        """That of the drafter, and that there is a branch."""
        return f"{self.drafter.identity()} with lookup"

    def compile(self) -> None:
        """Compile the drafter."""
        self.drafter.compile()

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session of both for prompts [B, T] of lengths [B]."""
        return LookupBranch(self, prompts, lengths)


class LookupBranch(DraftSession):
    """A session whose trees are grafted with what the row's past offers."""

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
        """The drafter's own, where there is nothing to graft."""
        if self.has_branch(budget):
            return None
        return self.session.recipe(self.drafter.own_budget(budget), draws)

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """The drafter's tree, half of it replaced by the branch if there is one."""
        follows = sampling.greedy or isinstance(random, NextDraws)
        own = self.drafter.own_budget(budget)
        if not follows or not self.has_branch(budget):
            return self.session.propose(own, sampling, random)
        nodes = budget.nodes - branch_nodes(own)
        tree = self.session.propose(Budget(nodes, min(own.depth, nodes - 1)), sampling, random)
        return grafted(tree, self.branch(budget.nodes - tree.num_nodes))

    def has_branch(self, budget: Budget) -> bool:
        """Whether the budget has room for a branch, and any row's past something to offer."""
        found = (past.continuation(1, LEAST_NGRAM) for past in self.lookup.pasts)
        return branch_nodes(self.drafter.own_budget(budget)) > 0 and any(found)

    def branch(self, count: int) -> torch.Tensor:
        """The `count` tokens that followed each row's last ones before, [B, count], or PADDING."""
        guesses = (past.continuation(count, LEAST_NGRAM) for past in self.lookup.pasts)
        rows = [guess or [PADDING] * count for guess in guesses]
        return torch.tensor(rows, device=self.lookup.device)


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
    return Budget(nodes, max(own.depth, branch))


def grafted(tree: TokenTree, branch: torch.Tensor) -> TokenTree:
    """The tree with a chain of tokens [B, m] under its root, beside its own children.

    A chain x y under the root of a tree with parents (-1, 0, 1) makes the parents
    (-1, 0, 1, 0, 3). Its tokens may be in the tree as well: the rules that follow the target's own
    tokens then take the longer of both paths.
    """
    rows, length = branch.shape
    nodes, device = tree.num_nodes, branch.device
    places = torch.arange(length, device=device)
    chain = torch.where(places == 0, 0, nodes + places - 1)
    ancestors = torch.zeros(rows, nodes + length, nodes + length, dtype=torch.bool, device=device)
    ancestors[:, :nodes, :nodes] = tree.ancestors
    ancestors[:, nodes:, 0] = True
    ancestors[:, nodes:, nodes:] = places <= places[:, None]
    return TokenTree(
        torch.cat([tree.tokens, branch], dim=1),
        torch.cat([tree.parents, chain.expand(rows, -1)], dim=1),
        torch.cat([tree.depths, (1 + places).expand(rows, -1)], dim=1),
        ancestors,
        max(tree.max_depth, length),
        tree.width + 1,
    )
