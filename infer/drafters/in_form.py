"""Lookup for answers in a form, such as JSON: what the form demands is drafted first.

Where a grammar allows one token alone, it is accepted whatever the target thinks, at any
temperature. Copies go on after it, as far as they keep to the form, and where they end the form may
demand more: names, quotes and brackets come from the grammar, and values from earlier text.
"""

import math
from collections.abc import Callable

from drafthead.core.drafting.form import RowForm
from drafthead.core.trees.guesses import GuessTree
from drafthead.heads.growing.growing_tree import GrowingTree
from drafthead.infer.drafters.history import History

LIKELY = 0.9  # that one of `Forced.likely` comes
MOST_ENDS = 4  # of a guess, the likeliest, after which the form is asked what must follow

Path = tuple[int, list[int]]  # a node, and the tokens on the way to it
Guess = Callable[[History, int], GuessTree]  # of lookup after a history, up to so many nodes


class FormTree(GrowingTree):
    """A tree of texts that keep to a row's form, with what it demands after them."""

    def __init__(self, form: RowForm):
        super().__init__()
        self.form, self.answer = form.form, form.answer

    def demand(self, path: Path) -> Path:
        """Add what must follow a node; returns where that ends, as it is first written."""
        node, tokens = path
        sure, likely = self.form.forced([*self.answer, *tokens])
        score = self.tree.scores[node - 1] if node else 0.0
        for token in sure:
            node = self.add(node, token, score)
        score += math.log(LIKELY / max(1, len(likely)))
        ends = [node]
        for way in likely:
            ends.append(node)
            for token in way:
                ends[-1] = self.add(ends[-1], token, score)
        return ends[:2][-1], [*tokens, *sure, *[token for way in likely[:1] for token in way]]

    def add_legal(self, guess: GuessTree, above: Path) -> Path | None:
        """Add after a node what keeps to the form of a guess, and what must follow its ends.

        Returns where the likeliest text that goes on by the form ends; None if none does.
        """
        paths: list[Path | None] = [above]
        score = self.tree.scores[above[0] - 1] if above[0] else 0.0
        for token, parent, own in zip(guess.tokens, guess.parents, guess.scores, strict=True):
            before = paths[parent]
            if before is None or not self.form.legal([*self.answer, *before[1]], [token]):
                paths.append(None)
                continue
            paths.append((self.add(before[0], token, score + own), [*before[1], token]))
        followed = {parent for parent, path in zip(guess.parents, paths[1:], strict=True) if path}
        ends = [path for number, path in enumerate(paths) if path and number not in followed]
        ends.sort(key=lambda path: -self.tree.scores[path[0] - 1] if path[0] else 0.0)
        further = [(end, self.demand(end)) for end in ends[:MOST_ENDS] if end != above]
        return next((after for end, after in further if after != end), None)


def in_form(form: RowForm, past: History, nodes: int, guess: Guess) -> GuessTree:
    """The best `nodes` nodes of what a form demands after a row's history, and of guesses."""
    grown = FormTree(form)
    end: Path | None = grown.demand((0, []))
    while end is not None and len(grown) < nodes:
        found = guess(past.ahead(end[1]), nodes - len(grown))
        end = grown.add_legal(found, end) if found.tokens else None
    return grown.best(nodes)


def kept_in_form(form: RowForm, tree: GuessTree, nodes: int) -> GuessTree:
    """The best `nodes` nodes of a tree that keep to a form, with what it demands after them."""
    grown = FormTree(form)
    grown.add_legal(tree, (0, list[int]()))
    return grown.best(nodes)
