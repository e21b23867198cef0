"""A drafter and lookup as one: the best nodes of both, wherever lookup has something to offer.

A head cannot know long names and numbers of the prompt, and prompt lookup knows nothing else. Both
say how likely each of their nodes is: a head by its probabilities, lookup by how often matches of
such a length were right. A tree takes the best of all, so a long match fills it and a short one
hardly costs the head a node. And where lookup has found much again, a tree of lookup alone costs no
pass of a head at all: the planner learns when that is better (suffix decoding, Oliaro et al., 2024,
arXiv 2411.04975, decides it by a threshold).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.host import to_host
from drafthead.core.sampling import Sampling
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import GuessTree, token_tree
from drafthead.core.trees.recipe import Proposal, known
from drafthead.core.trees.tree import PADDING, Budget, TokenTree, free_budget
from drafthead.heads.growing.growing_tree import GrowingTree
from drafthead.heads.growing.static import free_budgets
from drafthead.infer.drafters.lookup import Lookup, PromptLookup
from drafthead.infer.drafters.store_lookup import LEAST_NGRAM, StoreLookup


class WithLookup(Drafter):
    """A drafter, and lookup beside it: in the row's own past, and by a table if there is one.

    The depth of a budget is the drafter's: a path of lookup may have as many tokens as there are
    nodes. Only under rules that follow the target's own tokens does lookup take part: copied tokens
    are not drawn, and whether there are any depends on the other rows of a batch.
    """

    def __init__(self, drafter: Drafter, stored: StoreLookup | None = None):
        self.drafter = drafter
        self.features = drafter.features
        most = max(budget.nodes for budget in drafter.budgets)
        self.lookup: Lookup = stored or PromptLookup(most - 1, LEAST_NGRAM)
        self.budgets = (*free_budgets(most), *drafter.budgets)

    def __repr__(self) -> str:
        return f"{self.drafter} with {self.lookup}"

    def compile(self, target: Target | None = None) -> None:
        self.drafter.compile(target)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        return WithLookupSession(self, prompts, lengths)


class WithLookupSession(DraftSession):
    """A drafter's session and lookup's."""

    row_state = ("session", "lookup")

    def __init__(self, drafter: WithLookup, prompts: torch.Tensor, lengths: torch.Tensor):
        """For prompts [B, T] of lengths [B]."""
        self.drafter = drafter
        self.session = drafter.drafter.start(prompts, lengths)
        self.lookup = drafter.lookup.start(prompts, lengths)

    def commit(self, committed: Committed) -> None:
        self.session.commit(committed)
        self.lookup.commit(committed)

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        """The drafter's tree, with what lookup has found; or lookup's alone.

        Where lookup takes part a draft does not stop early: nodes that it leaves free are lookup's,
        and a step with them is none of the drafter's smaller sizes.
        """
        if budget.depth == 0:
            return self.lookup.propose(budget, sampling, random)
        follows = sampling.greedy or isinstance(random, NextDraws)
        found = self.lookup.guesses(free_budget(budget.nodes), follows) if follows else None
        if found is None or found.num_nodes == 1:
            return self.session.propose(budget, sampling, random)
        tree = known(self.session.propose(replace(budget, least_chance=0.0), sampling, random))
        return merged(tree, found.trees, budget.nodes)


def learns_answers(drafter: Drafter | None) -> bool:
    """Whether what one session commits is drafted by others: then it must be an answer."""
    lookup = drafter.lookup if isinstance(drafter, WithLookup) else drafter
    return isinstance(lookup, StoreLookup) and lookup.earlier is not None


def merged(tree: TokenTree, guesses: Sequence[GuessTree], nodes: int) -> TokenTree:
    """The best nodes of a drafter's tree and of a guess for each row, the root among them.

    Of a chain x y with scores -0.1 and -0.3 and a guess x z with scores -0.2 and -0.9, three nodes
    are the root, x and y: both say x, which has the better of its scores.
    """
    assert tree.scores is not None
    # One table, for which the host waits once. Tokens are whole numbers in float32 as well.
    # Scores of chains by text are on the host.
    parts = tree.tokens.float(), tree.parents.float(), tree.scores.to(tree.tokens.device)
    table = torch.stack(parts, dim=1)
    roots, rows = [], []
    for (tokens, parents, scores), guess in zip(to_host(table), guesses, strict=True):
        both, numbers = GrowingTree(), [0]
        for token, parent, score in zip(tokens[1:], parents[1:], scores[1:], strict=True):
            proposes = token != PADDING  # what fills up a row does not
            numbers.append(both.add(numbers[int(parent)], int(token), score) if proposes else 0)
        both.add_tree(guess)
        roots.append(int(tokens[0]))
        rows.append(both.best(nodes - 1))
    return token_tree(roots, rows, tree.tokens.device)
