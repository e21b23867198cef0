"""Lookup in a datastore: trees of what the target has written before after the same words.

A tree has the likeliest of what followed in the row's own past, as in prompt lookup, in the
datastore or by a table of n-grams, and in what this process has written. It needs no training and
next to no time, so it pays wherever a target answers many requests of a kind.
"""

from collections.abc import Iterator
from pathlib import Path

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.heads.trees.static import TREE_SIZES, tree_budgets
from drafthead.heads.trees.tree import Budget
from drafthead.infer.drafters.datastore import DEPTH, Datastore
from drafthead.infer.drafters.earlier import Earlier
from drafthead.infer.drafters.guess_tree import Counted, GrowingTree, GuessTree
from drafthead.infer.drafters.match_record import MatchRecord
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.past import Lookup, Past
from drafthead.infer.drafters.stored import Record

LEAST_NGRAM = 2  # tokens that must have occurred in it before; one alone says too little
# Outlooks where so many tokens or more were found in the row's own past; elsewhere it is their
# number. Tokens found in the same text say more than as many found elsewhere.
OWN_OUTLOOK = {2: 5, 6: 7}
NOTHING_LEARNT = MatchRecord()


class StoreLookup(Lookup):
    """Trees from the row's own past and from a datastore or a table of n-grams."""

    budgets = tree_budgets(DEPTH)

    def __init__(self, stored: Datastore | NgramTable | None, earlier: Earlier | None = None):
        """`earlier` is what this process has written, which sessions add to."""
        self.stored, self.earlier = stored, earlier
        self.store = stored if isinstance(stored, Datastore) else None
        self.table = stored if isinstance(stored, NgramTable) else None
        self.distribution = None if self.table is None else self.table.distribution
        self.matches = MatchRecord()

    def __repr__(self) -> str:
        """A table of n-grams is another matter than a datastore."""
        grams = "" if self.table is None else f" with {self.table.record.ngrams}-grams"
        return super().__repr__() + grams

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """As measured on texts that are not in the datastore; if none were, as for any drafter."""
        return self._measured(NO_OUTLOOK, budget) or super().chances(budget)

    def chances_found(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """The same at an outlook, or at the next lower one that was met."""
        record = {} if self.stored is None else self.stored.record.reached
        known = max((met for met in record if 0 < met <= outlook), default=NO_OUTLOOK)
        return self._measured(known, budget) or self.chances(budget)

    def _measured(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        reached = self.stored.record.reached.get(outlook, {}) if self.stored is not None else {}
        sizes = [nodes for nodes in reached if nodes <= budget.nodes]
        return tuple(reached[max(sizes)][: budget.depth]) if sizes else ()

    def guess(self, past: Past, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's past.

        Under rules that do not follow the target's own tokens, the text of a seed depends on what
        is drafted. It must not depend on earlier answers, which are then left out, and neither on
        what they taught of matches.
        """
        tree, depth = GrowingTree(), min(depth, DEPTH)
        own = past.continuation(min(nodes, depth), LEAST_NGRAM)
        matches = self.matches if follows else NOTHING_LEARNT
        scores = matches.log_chances(past.matched(LEAST_NGRAM), len(own))
        tree.add_tree(GuessTree.chain(own, scores))
        counted = Counted.of(self.continuations(past, follows))
        reached = self.chances_at(self.found_elsewhere(past), Budget(max(TREE_SIZES), depth))
        tree.add_heaviest(counted, reached, len(tree) + nodes, depth)
        if self.table is not None:
            expected = self.table.after(past.tokens)
            tree.add_heaviest(expected, [1.0] * depth, len(tree) + nodes, depth)
        return tree.best(nodes)

    def learn(self, past: Past) -> None:
        """Remember the token for other rows and later answers."""
        if self.earlier is not None:
            self.earlier.add(past.tokens, len(past.tokens) - 1)

    def outlook(self, past: Past) -> int:
        """How much of the row's end was found again: in its past, or else elsewhere."""
        if own := past.matched(LEAST_NGRAM):
            return OWN_OUTLOOK[max(length for length in OWN_OUTLOOK if length <= own)]
        return self.found_elsewhere(past)

    def found_elsewhere(self, past: Past) -> int:
        """How many of the row's last tokens were found, in a row, beyond its own past."""
        elsewhere = [place for place in (self.stored, self.earlier) if place is not None]
        return max((place.matched(past.tokens) for place in elsewhere), default=0)

    def continuations(self, past: Past, follows: bool) -> Iterator[tuple[float, list[int]]]:
        """Weights and texts of what followed the end of a past, in the datastore and earlier."""
        if self.store is not None:
            yield from self.store.continuations(past.tokens)
        if self.earlier is not None and follows:
            yield from self.earlier.continuations(past.tokens)


def load_stored(folder: Path, vocabulary: str) -> Datastore | NgramTable:
    """What `drafthead build-datastore` has written into a folder, mapped into memory.

    Raises UserError when nothing can be read there, or when it is of another tokenizer.
    """
    record = Record.load(folder, vocabulary)
    kind = NgramTable if record.ngrams else Datastore
    return kind.load(folder, record)
