"""A drafter and lookup as one: the best nodes of both, wherever lookup has something to offer.

A head cannot know long names and numbers of the prompt, and prompt lookup knows nothing else. Both
say how likely each of their nodes is: a head by its probabilities, lookup by how often matches of
such a length were right. A tree takes the best of all, so a long match fills it and a short one
hardly costs the head a node. And where lookup has found much again, a tree of lookup alone costs no
pass of a head at all: the planner learns when that is better (suffix decoding, Oliaro et al., 2024,
arXiv 2411.04975, decides it by a threshold).

A table of n-grams is another matter. A head that was trained on the same answers knows what they
say: of 1,544 tokens that a table expected and neither the shipped head nor lookup did, 4 were
right, where counts promised 181 (benchmarks/smollm2/draft_sources.json).
So beside a drafter's own tree a table is asked at one step of 16, as long as
what it alone expects does not come true; and likewise for trees of lookup alone, while those with
the table are not accepted. See `TableUse`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.drafting.form import Forms, wanting
from drafthead.core.host import to_host
from drafthead.core.sampling import Sampling
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import Guesses, GuessTree, Proposal, known, only, token_tree
from drafthead.core.trees.tree import PADDING, Budget, Free, TokenTree, free_budget
from drafthead.heads.growing.growing_tree import GrowingTree
from drafthead.heads.growing.static import free_budgets
from drafthead.infer.drafters.in_form import kept_in_form
from drafthead.infer.drafters.lookup import Lookup, PromptLookup
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import (
    DEPTH,
    LEAST_NGRAM,
    TABLE,
    StoreLookup,
    add_expected,
)

FIRST_SHARE, FIRST_EXPECTED = 0.05, 4.0  # what is believed at first, and as how many tokens
KEPT = 1 - 1 / 64  # of what was learnt, at each step with a table
LEAST_SHARE = 0.25  # with less a table takes no node of a draft, and asking it takes time
STEPS_WITHOUT = 16  # of so many steps one asks a table that brings nothing


class TableUse:
    """The use of a table of n-grams beside a drafter, and whether it is worth asking.

    Several threads may teach it; if one addition overwrites another, little is lost.
    """

    def __init__(self) -> None:
        # Of the tokens that the table expects and the drafter does not: their sum, and right ones.
        self.expected = self.right = 0.0
        self.steps = 0  # with a draft of the drafter's, since the table was asked
        self.refused = 0  # steps in a row at which no tree of lookup alone was accepted

    @property
    def share(self) -> float:
        """The share of what the table alone expects that comes true, in (0, 1]."""
        first = FIRST_SHARE * FIRST_EXPECTED
        return min(1.0, (self.right + first) / (self.expected + FIRST_EXPECTED))

    def is_due(self, alone: bool) -> bool:
        """Whether the table is asked at this step, `alone` for a tree of lookup alone."""
        if alone:
            return self.refused < STEPS_WITHOUT or self.refused % STEPS_WITHOUT == 0
        self.steps += 1
        due = self.share >= LEAST_SHARE or self.steps >= STEPS_WITHOUT
        self.steps = 0 if due else self.steps
        return due

    def add(self, chances: Mapping[int, float], token: int) -> None:
        """Record the tokens that the table alone expected, and the one that came."""
        self.expected = KEPT * self.expected + sum(chances.values())
        self.right = KEPT * self.right + (token in chances)


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
        self.table = None if stored is None else stored.table
        self.table_use = TableUse()
        earlier = None if stored is None else stored.earlier
        own = PromptLookup(most - 1, LEAST_NGRAM)
        self.lookup: Lookup = own if earlier is None else StoreLookup(None, earlier)
        self.all = stored or self.lookup  # with the table
        self.all.matches = self.lookup.matches  # both learn from the same text
        self.names = *drafter.names, *self.all.names
        self.budgets = (*free_budgets(most), *drafter.budgets)

    def __repr__(self) -> str:
        return f"{self.drafter} with {self.all}"

    def compile(self, target: Target) -> None:
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
        self.by_table: list[dict[int, float]] = []  # see `TableUse.add`, of each row
        self.is_free = False  # the last draft, of lookup alone

    def commit(self, committed: Committed) -> None:
        if self.drafter.table is not None:
            self._learn_of_table(committed)
        self.session.commit(committed)
        self.lookup.commit(committed)

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        """The drafter's tree, with what lookup has found; or lookup's alone.

        Where lookup takes part a draft does not stop early: nodes that it leaves free are lookup's,
        and a step with them is none of the drafter's smaller sizes. Of rows that want drafts of
        some parts alone, each has the nodes of its own.
        """
        follows, drafter = sampling.greedy or isinstance(random, NextDraws), self.drafter
        self.session.wanted = self.lookup.wanted = self.wanted
        self.lookup.forms = self.forms
        own, looks = (wanting(self.wanted, part.names) for part in (drafter.drafter, drafter.all))
        self.is_free = isinstance(budget, Free)
        alone = self.is_free or not any([True] if own is None else own)
        # Where rows differ the table is that of those with nothing else.
        is_due = self.wanted is not None or drafter.table_use.is_due(alone)
        table = drafter.table if follows and is_due else None
        if alone:
            self.lookup.ask(drafter.lookup if table is None else drafter.all)
            free = self.lookup.propose(free_budget(budget.nodes), sampling, random)
            kept = only(free, looks)
            return kept if self.is_free else known(kept)
        self.lookup.ask(drafter.lookup)
        found = self.lookup.guesses(free_budget(budget.nodes), follows) if follows else None
        # Without the drafter's own nodes a form has none to judge.
        if found is None or (found.num_nodes == 1 and table is None and self.forms is None):
            return only(self.session.propose(budget, sampling, random), own)
        least = replace(budget, least_chance=0.0)
        tree = known(only(self.session.propose(least, sampling, random), own))
        if table is not None:
            trees = self._with_table(table, tree, found.trees, budget.nodes - 1)
            found = replace(found, trees=trees)
        kept = only(found, looks)
        assert isinstance(kept, Guesses)
        return merged(tree, kept.trees, budget.nodes, self.forms)

    def _learn_of_table(self, committed: Committed) -> None:
        """Record what became of the last draft, if it was one with rows of this batch."""
        use, new = self.drafter.table_use, committed.new_tokens
        if len(self.by_table) == len(new):
            for chances, tokens in zip(self.by_table, new, strict=True):
                if chances and tokens:
                    use.add(chances, tokens[0])
        accepted = self.is_free and any(len(tokens) > 1 for tokens in new)
        use.refused = 0 if accepted else use.refused + 1
        self.by_table, self.is_free = [], False

    def _with_table(
        self, table: NgramTable, tree: TokenTree, guesses: Sequence[GuessTree], nodes: int
    ) -> list[GuessTree]:
        """Guesses with what a table expects, by the share of it that comes true beside a draft."""
        log_share = math.log(self.drafter.table_use.share)
        wanted = self.wanted or [None] * len(guesses)
        parts = to_host(torch.stack([tree.tokens, tree.parents], dim=1))
        both = []
        for past, guess, (tokens, parents), names in zip(
            self.lookup.histories, guesses, parts, wanted, strict=True
        ):
            expected, grown = GrowingTree(), GrowingTree()
            if names is None or TABLE in names:
                add_expected(expected, table, past, nodes, DEPTH)
            drafted, of_table = first_tokens(tokens, parents), expected.tree
            others = {*drafted, *first_tokens(guess.tokens, guess.parents)}
            chances = {
                of_table.tokens[node]: math.exp(of_table.scores[node])
                for node, parent in enumerate(of_table.parents)
                if parent == 0 and of_table.tokens[node] not in others
            }
            self.by_table.append(chances if drafted else {})
            factor = log_share if drafted else 0.0
            grown.add_tree(guess)
            grown.add_tree(replace(of_table, scores=[each + factor for each in of_table.scores]))
            both.append(grown.tree)
        return both


def first_tokens(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The tokens of nodes right under the root, node 0, which padding is not."""
    pairs = zip(tokens, parents, strict=True)
    return [token for token, parent in pairs if parent == 0 and token != PADDING]


def merged(
    tree: TokenTree, guesses: Sequence[GuessTree], nodes: int, forms: Forms = None
) -> TokenTree:
    """The best nodes of a drafter's tree and of a guess for each row, the root among them.

    Of a row with a form those that keep to it, with what must follow them.

    Of a chain x y with scores -0.1 and -0.3 and a guess x z with scores -0.2 and -0.9, three nodes
    are the root, x and y: both say x, which has the better of its scores.
    """
    assert tree.scores is not None
    # One table, for which the host waits once. Tokens are whole numbers in float32 as well.
    # Scores of chains by text are on the host.
    parts = tree.tokens.float(), tree.parents.float(), tree.scores.to(tree.tokens.device)
    table = torch.stack(parts, dim=1)
    roots, rows = [], []
    known_forms = forms or [None] * len(guesses)
    for (tokens, parents, scores), guess, form in zip(
        to_host(table), guesses, known_forms, strict=True
    ):
        both, numbers = GrowingTree(), [0]
        for token, parent, score in zip(tokens[1:], parents[1:], scores[1:], strict=True):
            proposes = token != PADDING  # what fills up a row does not
            numbers.append(both.add(numbers[int(parent)], int(token), score) if proposes else 0)
        both.add_tree(guess)
        roots.append(int(tokens[0]))
        most = nodes - 1
        rows.append(both.best(most) if form is None else kept_in_form(form, both.tree, most))
    return token_tree(roots, rows, tree.tokens.device)
