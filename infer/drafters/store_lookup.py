"""Lookup in a datastore: trees of what the target has written before after the same words.

The row's own past goes first, as in prompt lookup; the rest of the tree is for what followed in the
datastore, and in what this process has written. It needs no training and next to no time, so it
pays wherever a target answers many requests of a kind.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import NO_OUTLOOK, Committed
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.trees.static import tree_budgets
from drafthead.heads.trees.tree import PADDING, Budget, TokenTree
from drafthead.infer.drafters.datastore import DEPTH, Datastore
from drafthead.infer.drafters.earlier import Earlier
from drafthead.infer.drafters.guess_tree import Counted, GuessTree
from drafthead.infer.drafters.past import Lookup, Past, Pasts

OWN = 8  # tokens that the row's own past proposes
LEAST_NGRAM = 2  # tokens that must have occurred in it before; one alone says too little
# Outlooks where so many tokens were found in the row's own past; elsewhere it is their number. What
# `build-datastore` shows for SmolLM2-135M's answers puts them around six tokens found elsewhere.
OWN_OUTLOOK = {2: 5, 3: 7}


class StoreLookupSession(Pasts["StoreLookup"]):
    """A datastore at work."""

    def commit(self, committed: Committed) -> None:
        """Add the committed tokens to each row's past, and to what the process remembers."""
        known = [len(past.tokens) for past in self.pasts]
        super().commit(committed)
        if (earlier := self.drafter.earlier) is not None:
            for past, first in zip(self.pasts, known, strict=True):
                for place in range(first, len(past.tokens)):
                    earlier.add(past.tokens, place)

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """Each row's own tree; the root alone if there is nothing to guess."""
        follows = sampling.greedy or isinstance(random, NextDraws)
        trees = [
            self.drafter.guess(past, budget.nodes - 1, budget.depth, follows) for past in self.pasts
        ]
        roots = [past.tokens[-1] for past in self.pasts]
        return token_tree(roots, trees, self.device)


class StoreLookup(Lookup):
    """Trees from the row's own past and from a datastore."""

    session = StoreLookupSession
    budgets = tree_budgets(DEPTH)

    def __init__(self, store: Datastore | None, earlier: Earlier | None = None):
        """`earlier` is what this process has written, which sessions add to."""
        self.store, self.earlier = store, earlier

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """As measured on texts that are not in the datastore; if none were, as for any drafter."""
        return self._measured(NO_OUTLOOK, budget) or super().chances(budget)

    def chances_found(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """The same at an outlook, or at the next lower one that was met."""
        record = {} if self.store is None else self.store.record.reached
        known = max((met for met in record if 0 < met <= outlook), default=NO_OUTLOOK)
        return self._measured(known, budget) or self.chances(budget)

    def _measured(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        reached = self.store.record.reached.get(outlook, {}) if self.store is not None else {}
        sizes = [nodes for nodes in reached if nodes <= budget.nodes]
        return tuple(reached[max(sizes)][: budget.depth]) if sizes else ()

    def guess(self, past: Past, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's past.

        Under rules that do not follow the target's own tokens, the text of a seed depends on what
        is drafted. It must not depend on earlier answers, which are then left out.
        """
        counted = Counted.of(self.continuations(past, follows))
        own = past.continuation(OWN, LEAST_NGRAM)
        return GuessTree.grown(own, counted, nodes, depth)

    def outlook(self, past: Past) -> int:
        """How much of the row's end was found again: in its past, or else elsewhere."""
        if own := past.matched(LEAST_NGRAM):
            return OWN_OUTLOOK[own]
        elsewhere = [place for place in (self.store, self.earlier) if place is not None]
        return max((place.matched(past.tokens) for place in elsewhere), default=0)

    def continuations(self, past: Past, follows: bool) -> Iterator[tuple[float, list[int]]]:
        """Weights and texts of what followed the end of a past, in the datastore and earlier."""
        if self.store is not None:
            yield from self.store.continuations(past.tokens)
        if self.earlier is not None and follows:
            yield from self.earlier.continuations(past.tokens)


def token_tree(roots: Sequence[int], trees: Sequence[GuessTree], device: torch.device) -> TokenTree:
    """Trees of different sizes as one batch; what is missing is padding under the root."""
    nodes = 1 + max(len(tree.tokens) for tree in trees)
    # Of each node: token, parent, depth, and which nodes are its ancestors or itself. Made here,
    # where the trees are, and copied to the device at once.
    table = np.zeros((len(trees), nodes, 3 + nodes), dtype=np.int64)
    table[:, :, 0], table[:, 0, 1], table[:, 1:, 2], table[:, :, 3] = PADDING, -1, 1, 1
    for row, root, tree in zip(table, roots, trees, strict=True):
        count = 1 + len(tree.tokens)
        row[:count, 0] = [root, *tree.tokens]
        row[1:count, 1], row[1:count, 2] = tree.parents, tree.depths
        for node, parent in enumerate(tree.parents, start=1):
            row[node, 3:] = row[parent, 3:]
            row[node, 3 + node] = 1
        row[range(count, nodes), range(3 + count, 3 + nodes)] = 1
    there = torch.from_numpy(table).to(device)
    tokens, parents, depths = (there[:, :, column].contiguous() for column in range(3))
    deepest = int(table[:, :, 2].max())
    return TokenTree(tokens, parents, depths, there[:, :, 3:].bool(), deepest, nodes - 1)
