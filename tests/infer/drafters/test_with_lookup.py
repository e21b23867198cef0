"""A branch of prompt lookup in a drafter's tree."""

import pytest
import torch
from tiny import BUSHY, tiny_llama

from drafthead.heads.drafting.drafter import Committed
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.features import Features
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import PADDING, Budget, TokenTree, TreeShape, ancestor_mask
from drafthead.infer import Decoder
from drafthead.infer.drafters.with_lookup import LOOKUP, WithLookup, branch_nodes, grafted

GREEDY = SamplingConfig()


def test_a_chain_is_grafted_under_the_root() -> None:
    tree = TokenTree.from_shape(TreeShape.chain(2), torch.tensor([[5, 6, 7]]))
    branch = TokenTree.from_shape(TreeShape.chain(2), torch.tensor([[5, 8, 9]]))
    both = grafted(tree, branch)
    assert both.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert both.parents.tolist() == [[-1, 0, 1, 0, 3]]
    assert both.depths.tolist() == [[0, 1, 2, 1, 2]]


@pytest.mark.parametrize("length", [1, 4, 0])  # of a chain; 0 for a bushy branch
def test_ancestors_follow_from_the_parents(length: int) -> None:
    tokens = torch.arange(2 * BUSHY.num_nodes).view(2, -1)
    shape = TreeShape.chain(length) if length else BUSHY
    branch = TokenTree.from_shape(shape, torch.full((2, shape.num_nodes), PADDING))
    both = grafted(TokenTree.from_shape(BUSHY, tokens), branch)
    assert both.ancestors.equal(ancestor_mask(both.parents, both.max_depth))
    assert both.max_depth == max(3, length)
    assert both.depths.equal(both.ancestors.sum(-1) - 1)


def session_after(drafter: WithLookup, *rows: list[int]):
    """A session of a draft model for which rows of one length were committed."""
    tokens = torch.tensor(rows)
    lengths = torch.full((len(rows),), tokens.shape[1] - 1)
    session = drafter.start(tokens[:, :-1], lengths)
    session.commit(Committed(tokens[:, 1:], Features(None, ()), lengths))
    return session


def test_half_of_the_tree_is_what_followed_before(target, make_drafter) -> None:
    drafter = make_drafter("self+lookup", target)
    session = session_after(drafter, [10, 11, 12, 13, 14, 10, 11], [20, 21, 22, 23, 24, 25, 26])
    tree = session.propose(Budget(8, 3), GREEDY, None)
    assert tree.tokens.shape[1] <= 8
    assert tree.tokens[0, -4:].tolist() == [12, 13, 14, 10]
    assert tree.tokens[1, -4:].tolist() == [PADDING] * 4


def test_a_text_without_repetition_leaves_the_whole_tree_to_the_drafter(target, make_drafter):
    rows = [list(range(10, 17)), [20, 21, 20, 22, 20, 23, 20]]  # one token repeats, no two
    alone = session_after(make_drafter("self+lookup", target), *rows)
    tree = alone.propose(Budget(8, 3), GREEDY, None)
    plain = make_drafter("self", target)
    expected = session_after(WithLookup(plain), *rows).session.propose(Budget(8, 3), GREEDY, None)
    assert tree.tokens.equal(expected.tokens)


def test_trees_of_rules_that_draw_have_no_branch(target, make_drafter) -> None:
    session = session_after(make_drafter("self+lookup", target), [10, 11, 12, 10, 11])
    random = RowRandom([1], torch.device("cpu"))
    random.begin_step([8])
    assert session.has_branch(Budget(8, 3))
    tree = session.propose(Budget(8, 3), SamplingConfig(temperature=1.0), random)
    assert tree.draft_probs is not None


def test_trees_of_lookup_alone_ask_the_drafter_for_nothing(target, make_drafter) -> None:
    drafter = make_drafter("self+lookup", target)
    session = session_after(drafter, [10, 11, 12, 13, 14, 10, 11])
    session.session.propose = None  # whoever calls it fails
    budget = Budget(4, 3, LOOKUP)
    assert budget in drafter.budgets and budget not in drafter.main_budgets
    tree = session.propose(budget, GREEDY, None)
    assert tree.tokens.tolist() == [[11, 12, 13, 14]]
    assert session.recipe(budget, None) is None
    assert session.outlook() == 2


def test_small_trees_have_no_branch() -> None:
    assert [branch_nodes(Budget(nodes, 1)) for nodes in (2, 3, 4, 16)] == [0, 0, 2, 8]


@pytest.mark.parametrize(("name", "budget"), [("self", Budget(16, 3)), ("medusa:tree", None)])
def test_repeated_text_is_accepted_beyond_the_depth_of_the_drafter(
    make_drafter, name: str, budget: Budget | None
) -> None:
    """With small weights the target repeats itself."""
    target = Target(tiny_llama(initializer_range=0.02))
    longest = {}
    for one in (name, f"{name}+lookup"):
        decoder = Decoder(target, make_drafter(one, target), budget)
        longest[one] = max(decoder.generate([9, 8], max_new_tokens=64).stats.accept_lengths[0])
    assert longest[name] <= 4
    assert longest[f"{name}+lookup"] > 4


def test_a_branch_comes_on_top_of_a_tree_that_is_fixed(target, make_drafter) -> None:
    own = BUSHY.num_nodes
    drafter = make_drafter("medusa:tree+lookup", target)
    [budget] = drafter.main_budgets
    assert budget == Budget(own + own // 2, max(BUSHY.depth, own // 2))
    assert drafter.own_budget(budget) == BUSHY.budget


def test_the_planner_expects_the_better_of_head_and_datastore(target, make_drafter) -> None:
    drafter = make_drafter("parallel:own+store", target)
    budget = Budget(16, 10)
    own = drafter.drafter.chances(drafter.own_budget(budget))
    drafter.lookup.store.record.reached[3] = {8: [own[0] / 2, *[own[1] + 0.1] * 9]}
    assert drafter.chances_at(3, budget)[0] == own[0]
    assert drafter.chances_at(3, budget)[1:] == pytest.approx([own[1] + 0.1] * 7)
    assert drafter.chances_at(0, budget)[: len(own)] == own  # nothing was found
    assert drafter.chances_at(3, Budget(8, 7, LOOKUP)) == drafter.lookup.chances_at(3, Budget(8, 7))


def test_a_head_and_a_draft_model_at_once_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="choose one of head and draft_model"):
        Decoder.from_pretrained(tmp_path, head="a", draft_model="b")
