"""Token trees, on an example that is written down once.

        0
       / \\
      1   2          paths (0,) (1,)
     / \\   \\
    3   4   5        paths (0, 0) (0, 1) (1, 0)
"""

import pytest
import torch

from drafthead.core.errors import UserError
from drafthead.core.trees.guesses import GuessTree
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape, TreeTables, ancestor_mask
from drafthead.heads.growing.static import MEDUSA_PATHS, StaticTrees, grow_tree

PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
PARENTS = [-1, 0, 0, 1, 1, 2]
DEPTHS = [0, 1, 1, 2, 2, 2]
RANKS = [0, 0, 1, 0, 1, 0]
ANCESTORS = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 0],
    [1, 1, 0, 0, 1, 0],
    [1, 0, 1, 0, 0, 1],
]


def test_paths_become_index_tables() -> None:
    shape = TreeShape.from_paths(reversed(PATHS))  # any order will do
    assert shape.parents.tolist() == PARENTS
    assert shape.depths.tolist() == DEPTHS
    assert shape.ranks.tolist() == RANKS
    assert (shape.num_nodes, shape.depth, shape.width) == (6, 2, 2)


def test_nodes_see_themselves_and_their_ancestors() -> None:
    assert ancestor_mask(torch.tensor(PARENTS)).int().tolist() == ANCESTORS
    batch = torch.tensor([PARENTS, [-1, 0, 1, 2, 3, 4]])
    masks = ancestor_mask(batch)
    assert masks[0].int().tolist() == ANCESTORS
    assert masks[1].equal(torch.ones(6, 6).tril().bool())


def test_a_chain_is_the_tree_of_width_one() -> None:
    chain = TreeShape.chain(3)
    assert chain.parents.tolist() == [-1, 0, 1, 2]
    assert (chain.depth, chain.width, chain.num_nodes) == (3, 1, 4)
    assert TreeShape.chain(0).num_nodes == 1


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([(0,), (0,)], "twice"),
        ([(0, 0)], r"needs \(0,\)"),
        ([(0,), (1, 0)], r"needs \(1,\)"),
        ([(-1,)], "negative"),
    ],
)
def test_impossible_trees_are_refused(paths: list, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        TreeShape.from_paths(paths)


def test_children_that_are_drawn_leave_no_gap() -> None:
    shape = TreeShape.from_paths([(0,), (2,), (2, 1), (2, 3), (0, 1)])
    assert shape.paths == ((0,), (2,), (0, 1), (2, 1), (2, 3))
    assert shape.gapless.paths == ((0,), (1,), (0, 0), (1, 0), (1, 1))
    assert torch.equal(shape.parents, shape.gapless.parents)
    assert TreeShape.chain(3).gapless == TreeShape.chain(3)


def test_growing_takes_the_most_frequent_paths() -> None:
    counts = {(0,): 60, (1,): 20, (0, 0): 40, (0, 1): 5, (1, 0): 4, (0, 0, 0): 30}
    assert grow_tree(counts, 5).paths == ((0,), (1,), (0, 0), (0, 0, 0))
    assert grow_tree(counts, 5, max_depth=1).paths == ((0,), (1,))
    assert grow_tree(counts, 1).paths == ()


def test_growing_never_leaves_a_node_without_its_better_siblings() -> None:
    counts = {(0,): 10, (2,): 9, (1,): 1}
    assert grow_tree(counts, 4).paths == ((0,), (1,), (2,))
    assert grow_tree(counts, 3).paths == ((0,), (1,))


def test_a_shape_is_shared_by_all_rows_of_a_batch() -> None:
    shape = TreeShape.from_paths(PATHS)
    tree = TokenTree.from_shape(shape, torch.arange(12).view(2, 6))
    assert tree.parents.tolist() == [PARENTS, PARENTS]
    assert tree.ancestors.shape == (2, 6, 6)


def test_a_row_may_have_a_tree_of_its_own() -> None:
    parents = torch.tensor([PARENTS, [-1, 0, 1, 2, 3, 4]])
    tokens = torch.arange(12).view(2, 6)
    tree = TreeTables.of(tokens, parents, torch.zeros(2, 6), levels=5).tree(levels=5, width=2)
    assert tree.depths.tolist() == [DEPTHS, [0, 1, 2, 3, 4, 5]]
    assert tree.ancestors.equal(ancestor_mask(parents))
    assert (tree.max_depth, tree.width, tree.draft_ids) == (5, 2, None)


# Trees of heads that were not measured


def test_an_unmeasured_head_grows_its_trees_from_the_usual_paths() -> None:
    trees = StaticTrees(None, 4, usual=MEDUSA_PATHS)
    assert sorted(trees.shape(Budget(64, 4)).paths) == sorted(MEDUSA_PATHS)
    assert set(trees.shape(Budget(6, 4)).paths) == set(MEDUSA_PATHS[:5])
    assert StaticTrees(None, 1, usual=MEDUSA_PATHS).shape(Budget(4, 1)).paths == ((0,), (1,), (2,))
    measured = {(): 9, (0,): 5, (3,): 4}
    assert StaticTrees(measured, 4, usual=MEDUSA_PATHS).shape(Budget(3, 1)).paths == ((0,), (1,))


def test_a_wider_tree_is_taken_to_be_accepted_more_often() -> None:
    trees = StaticTrees(None, 4, usual=MEDUSA_PATHS)
    chain, wide = trees.chances(Budget(2, 1)), trees.chances(Budget(64, 4))
    assert chain == pytest.approx((0.6,))  # of the first guess; the next in as many of the others
    assert 0.6 < wide[0] < 1 and sorted(wide, reverse=True) == list(wide)
    assert StaticTrees(None, 4).chances(Budget(2, 1)) is None


def test_of_equal_guesses_the_first_stays_which_is_never_a_child_without_its_parent() -> None:
    """Nodes 1 and 2 under it have one score, and node 3 a better one."""
    best = GuessTree([1, 2, 3], [0, 1, 0], [1, 2, 1], [-1.0, -1.0, -0.5]).best(2)
    assert (best.tokens, best.parents, best.depths) == ([1, 3], [0, 0], [1, 1])
