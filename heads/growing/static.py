"""Static trees: the sizes worth choosing from, and the best tree of each by measured paths."""

import math

from drafthead.core.errors import UserError
from drafthead.core.trees.tree import UNMEASURED_ALPHA, Budget, Path, TreeShape, free_budget

# The choices that Medusa publishes for Vicuna 7B and Hydra takes over, in their order: ranks of the
# guesses at depth 1, 2, ... Heads of other targets are served with them, too.
MEDUSA_CHOICES = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21
004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001
16 070
"""
MEDUSA_PATHS: tuple[Path, ...] = tuple(tuple(map(int, path)) for path in MEDUSA_CHOICES.split())
# Tree sizes that differ enough to choose between; 64 nodes are cheap to verify on large GPUs only.
TREE_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def tree_budgets(depth: int) -> tuple[Budget, ...]:
    """Budgets of a drafter whose cost does not depend on how deep its trees are."""
    return tuple(Budget(nodes, min(depth, nodes - 1)) for nodes in TREE_SIZES)


def shallow_budgets(depth: int) -> tuple[Budget, ...]:
    """`tree_budgets` and small trees of one and two levels, for a cost that grows with depth."""
    shallow = [Budget(nodes, d) for d in (1, 2) for nodes in TREE_SIZES if d < nodes <= 4 * d]
    deep = tree_budgets(depth)
    return tuple(sorted({*deep, *(b for b in shallow if b.depth <= depth)}))


def chain_budgets(depth: int) -> tuple[Budget, ...]:
    """Budgets of a drafter of chains of up to `depth` tokens."""
    return tuple(Budget(length + 1, length) for length in range(1, depth + 1))


def free_budgets(nodes: int) -> tuple[Budget, ...]:
    """Budgets of drafts that cost no pass, of up to `nodes` nodes."""
    sizes = [size for size in TREE_SIZES if size < nodes]
    return tuple(free_budget(size) for size in (*sizes, min(nodes, TREE_SIZES[-1])))


def grow_tree(
    path_counts: dict[Path, int], num_nodes: int, max_depth: int | None = None
) -> TreeShape:
    """The tree of at most `num_nodes` nodes with the largest expected number of accepted tokens.

    `path_counts[(r1, .., rd)]` counts the held-out positions at which the true continuation was
    the r1-th guess of depth 1 and ... and the rd-th guess of depth d, so it is the number of times
    that node would have been accepted. A child is accepted no more often than its parent, hence
    the most frequent paths form the best tree. Medusa's product of accuracies (arXiv 2401.10774,
    section 2.3.3) assumes that depths are independent; counting whole paths does not.
    """
    if num_nodes < 1:
        raise UserError(f"a token tree needs at least 1 node, got {num_nodes}")
    paths = filter(None, path_counts)  # the empty path is the root
    ordered = sorted(paths, key=lambda path: (-path_counts[path], len(path), path))
    chosen: dict[Path, None] = {(): None}  # in the order of choice
    for path in ordered:
        fits = max_depth is None or len(path) <= max_depth
        if fits and path[:-1] in chosen:
            # Drawn children come in order, so a node needs its better-ranked siblings.
            chosen.update(dict.fromkeys((*path[:-1], rank) for rank in range(path[-1] + 1)))
    return TreeShape.from_paths(list(chosen)[1:num_nodes])


class StaticTrees:
    """The static tree of a head for each budget: grown from measured paths, or always the same."""

    def __init__(
        self,
        path_counts: dict[Path, int] | None,
        max_depth: int,
        fixed: TreeShape | None = None,
        usual: tuple[Path, ...] = (),
    ):
        """Without a fixed tree and without measured paths, the trees are grown from the `usual`
        ones, the most frequent first; without these, too, they are chains.
        """
        self.path_counts, self.max_depth, self.fixed = path_counts, max_depth, fixed
        self.order = path_counts or {path: -place for place, path in enumerate(usual)}
        self.grown: dict[Budget, TreeShape] = {}
        if fixed is not None:
            self.budgets: tuple[Budget, ...] = (fixed.budget,)
        else:
            self.budgets = (shallow_budgets if self.order else chain_budgets)(max_depth)

    def shape(self, budget: Budget) -> TreeShape:
        """The tree for a budget; always the fixed tree, if there is one."""
        if self.fixed is not None:
            return self.fixed
        if budget not in self.grown:
            depth = min(budget.depth, self.max_depth)
            self.grown[budget] = (
                self._from_paths(budget.nodes, depth)
                if self.order
                else TreeShape.chain(min(depth, budget.nodes - 1))
            )
        return self.grown[budget]

    def _from_paths(self, num_nodes: int, depth: int) -> TreeShape:
        """The best tree by the measured paths; a chain of 1 where no guess was ever right."""
        grown = grow_tree(self.order, num_nodes, depth)
        return grown if grown.depth > 0 else TreeShape.chain(1)

    def scores(self, shape: TreeShape) -> list[float]:
        """Logarithms of how often the path of each node of a tree was right, the root's first.

        Without measurements a guess is right in UNMEASURED_ALPHA of all cases, the next best in as
        many of the others, and so on.
        """
        if not self.path_counts or not self.path_counts.get(()):
            right, wrong = math.log(UNMEASURED_ALPHA), math.log(1 - UNMEASURED_ALPHA)
            return [0.0, *(len(path) * right + sum(path) * wrong for path in shape.paths)]
        everywhere = self.path_counts[()]
        found = (self.path_counts.get(path, 0) for path in shape.paths)
        # Half a count more, so that a path that was never seen is improbable and not impossible.
        return [0.0, *(math.log((count + 0.5) / (everywhere + 1)) for count in found)]

    def chances(self, budget: Budget) -> tuple[float, ...] | None:
        """The shares in which a budget's tree was accepted to depth 1, 2, ...; None: not measured.

        A true continuation follows one path at most, so the shares of a depth's paths add up. Of a
        tree that was not measured they are those of its scores.
        """
        counts = self.path_counts
        if not self.order or (counts and not counts.get(())):
            return None
        shape = self.shape(budget)
        accepted = [0.0] * shape.depth
        for path, share in zip(shape.paths, self._shares(shape), strict=True):
            accepted[len(path) - 1] += share
        return tuple(accepted)

    def _shares(self, shape: TreeShape) -> list[float]:
        """Return how often the path of each node below the root was right."""
        counts = self.path_counts or {}
        if everywhere := counts.get((), 0):
            return [counts.get(path, 0) / everywhere for path in shape.paths]
        return [math.exp(score) for score in self.scores(shape)[1:]]
