"""Lookup in what the target has written before: trees of what followed the same words.

A tree has the likeliest of what followed in the row's own past, as in prompt lookup, by a table of
n-grams (`drafthead data index`), and in what this process has written. It needs no training
and next to no time, so it pays wherever a target answers many requests of a kind (retrieval instead
of a draft model: REST, He et al., 2023, arXiv 2311.08252).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path

from drafthead.core.trees.guesses import GuessTree
from drafthead.heads.growing.growing_tree import GrowingTree
from drafthead.heads.growing.static import TREE_SIZES, free_budgets
from drafthead.infer.drafters.history import History, MatchRecord
from drafthead.infer.drafters.lookup import Lookup
from drafthead.infer.drafters.ngram_table import NgramTable, TableRecord

LEAST_NGRAM = 2  # tokens that must have occurred before; one alone says too little
# Lengths of n-grams by which earlier answers are found, and how much what follows one of them
# counts against what follows the others.
LEVELS = {6: 1.0, 4: 0.4, 3: 0.15, 2: 0.05}
DEPTH = 10  # tokens after a place that are read
PLACES = 4  # of one n-gram that are remembered, the latest
TREE_FOR_ONE = 4  # nodes of a tree for each token of its likeliest path
LIMIT = 200_000  # tokens that are remembered, at most
# Of what a table expects of the next token, the share that comes true where lookup expects another
# one: counts overrate what was seen a few times. By a half, lookup with a table has 3 to 4 % more
# tokens a pass than with counts as they are (benchmarks/smollm2/draft_sources.json).
TRUE_SHARE = 0.5
NOTHING_LEARNT = MatchRecord()
TABLE, ANSWERS = "ngrams", "answers"  # what requests call the parts of stores

Place = tuple[list[int], int]  # a text, which may still grow, and a position in it
Index = dict[int, list[Place]]  # by hash of an n-gram: where the token after it is


class Earlier:
    """The latest texts of this process, by their salts and n-grams. Several threads may use it.

    A server that gets similar requests drafts the next answers from the last ones (suffix decoding,
    Oliaro et al., 2024, arXiv 2411.04975, keeps such an index as a suffix tree).
    """

    def __init__(self, limit: int = LIMIT):
        """Forget the older half once half of `limit` tokens have come since the last time.

        So between half of them and all of them are remembered.
        """
        self.limit, self.count = limit, 0
        self.young: Index = {}
        self.old: Index = {}

    def add(self, text: list[int], place: int, salt: str = "") -> None:
        """Remember that the token at a place of a text follows the tokens before it.

        The text is kept, not copied: what follows later is known as soon as it is there.
        """
        for length in LEVELS:
            if length <= place:
                key = hash((salt, *text[place - length : place]))
                places = self.young.setdefault(key, [])
                places.append((text, place))
                del places[:-PLACES]
        self.count += 1
        if self.count > self.limit // 2:
            self.young, self.old, self.count = {}, self.young, 0

    def continuations(self, past: History) -> Iterator[tuple[float, list[int]]]:
        """Weights and texts of up to `DEPTH` tokens: what followed the end of `past` elsewhere."""
        for length, weight in LEVELS.items():
            places = self._places(past, length)
            texts = [text[place : place + DEPTH] for text, place in places]
            for text in texts:
                yield weight / len(texts), text

    def matched(self, past: History) -> int:
        """Tokens of the longest n-gram at the end of `past` that other texts hold; 0 for none."""
        return next((length for length in LEVELS if self._places(past, length)), 0)

    def _places(self, past: History, length: int) -> list[Place]:
        """The places after the n-gram of a length with which the past ends, but its own."""
        if length > len(past.tokens):
            return []
        key = hash((past.salt, *past.tokens[-length:]))
        places = [*self.young.get(key, ()), *self.old.get(key, ())]
        return [(text, place) for text, place in places if text is not past.text]


class Continuations:
    """A token of some texts, and what follows it there."""

    __slots__ = ("children", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.children: dict[int, Continuations] = {}

    @classmethod
    def of(cls, texts: Iterable[tuple[float, Sequence[int]]]) -> "Continuations":
        """The common root of weighted texts; a negative token ends a text."""
        root = cls()
        for weight, text in texts:
            root.weight += weight
            node = root
            for token in text:
                if token < 0:
                    break
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = cls()
                child.weight += weight
                node = child
        return root


class StoreLookup(Lookup):
    """Trees from the row's own past, from a table of n-grams and from earlier answers."""

    budgets = free_budgets(TREE_SIZES[-1])
    most_drawn = DEPTH

    def __init__(self, table: NgramTable | None, earlier: Earlier | None = None):
        """`earlier` is what this process has written, which sessions add to."""
        self.table, self.earlier = table, earlier
        parts = {TABLE: table, ANSWERS: earlier}
        self.names = tuple(name for name, part in parts.items() if part is not None)
        self.distribution = None if table is None else table.distribution
        self.matches = MatchRecord()

    def __repr__(self) -> str:
        grams = "" if self.table is None else f" with {self.table.record.ngrams}-grams"
        return super().__repr__() + grams

    def guess(self, past: History, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's past.

        Under rules that do not follow the target's own tokens, the text of a seed depends on what
        is drafted. It must not depend on earlier answers, which are then left out, and neither on
        what they taught of matches.
        """
        tree = GrowingTree()
        own, depth = past.continuation(min(nodes, depth), LEAST_NGRAM), min(depth, DEPTH)
        matches = self.matches if follows else NOTHING_LEARNT
        scores = matches.log_chances(past.matched(LEAST_NGRAM), len(own))
        tree.add_tree(GuessTree.chain(own, scores))
        if self.earlier is not None and follows:
            counted = Continuations.of(self.earlier.continuations(past))
            matched = self.earlier.matched(past)
            found = NOTHING_LEARNT.log_chances(max(1, matched), depth)
            tree.add_heaviest(counted, [*map(math.exp, found)], len(tree) + nodes, depth)
        if self.table is not None:
            add_expected(tree, self.table, past, len(tree) + nodes, depth)
        return tree.best(nodes)

    def part(self, names: frozenset[str] | None) -> "StoreLookup":
        if names is None:
            return self
        twin = copy(self)
        twin.table = self.table if TABLE in names else None
        twin.earlier = self.earlier if ANSWERS in names else None
        return twin

    def learn(self, past: History) -> None:
        if self.earlier is not None:
            self.earlier.add(past.tokens, len(past.tokens) - 1, past.salt)


class LookupChains(StoreLookup):
    """The likeliest path of such trees, for what takes chains alone."""

    def guess(self, past: History, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """A chain of up to `nodes` tokens, fewer where longer ones are unlikely."""
        tree = super().guess(past, TREE_FOR_ONE * nodes, depth, follows)
        likeliest: dict[int, int] = {}  # of each node's children, by number
        for node in tree.order():
            likeliest.setdefault(tree.parents[node], node)
        path, node = list[int](), 0
        while node in likeliest and len(path) < nodes:
            path.append(likeliest[node])
            node = path[-1] + 1  # the root is node 0
        return GuessTree.chain([tree.tokens[n] for n in path], [tree.scores[n] for n in path])


def add_expected(
    tree: GrowingTree, table: NgramTable, past: History, nodes: int, depth: int
) -> None:
    """Add what a table expects after a row's past until there are `nodes` nodes, to a depth."""
    true = [TRUE_SHARE ** (place + 1) for place in range(depth)]
    tree.add_heaviest(table.after(past.tokens), true, nodes, depth)


def load_table(folder: Path, vocabulary: str) -> NgramTable:
    """The table that `drafthead data index` has written into a folder, mapped into memory.

    Raises UserError when nothing can be read there, or when it is of another tokenizer.
    """
    return NgramTable.load(folder, TableRecord.load(folder, vocabulary))
