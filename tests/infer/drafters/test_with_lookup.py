"""Prompt lookup beside a drafter."""

import pytest
import torch
from tiny import tiny_llama

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import GuessTree
from drafthead.core.trees.tree import PADDING, Budget, Free, TokenTree, TreeShape, ancestor_mask
from drafthead.infer import Decoder
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import StoreLookup
from drafthead.infer.drafters.with_lookup import STEPS_WITHOUT, TableUse, WithLookup, merged

GREEDY = SamplingConfig()


def guess_of(tokens: str, *scores: float) -> GuessTree:
    """A chain of lookup, a letter a token."""
    return GuessTree.chain([ord(token) for token in tokens], scores)


def chain_of(tokens: str, *scores: float) -> TokenTree:
    """A drafter's chain; the first letter is the root."""
    table = torch.tensor([[ord(token) for token in tokens]])
    return TokenTree.from_shape(
        TreeShape.chain(len(tokens) - 1), table, scores=torch.tensor([0.0, *scores])
    )


@pytest.mark.parametrize(
    ("guess", "scores", "nodes", "expected"),
    [
        ("xz", (-0.2, -0.9), 3, "rxy"),  # both say x
        ("xz", (-0.2, -0.9), 4, "rxyz"),
        ("xz", (-0.2, -0.25), 3, "rxz"),
        ("abc", (-0.05, -0.1, -0.2), 4, "rxab"),
        ("abc", (-2.0, -3.0, -4.0), 3, "rxy"),
        ("", (), 3, "rxy"),
    ],
)
def test_a_tree_has_the_best_nodes_of_both(
    guess: str, scores: tuple[float, ...], nodes: int, expected: str
) -> None:
    tree = merged(chain_of("rxy", -0.1, -0.3), [guess_of(guess, *scores)], nodes)
    assert "".join(map(chr, tree.tokens[0].tolist())) == expected
    assert tree.ancestors.equal(ancestor_mask(tree.parents, tree.max_depth))
    assert tree.depths.equal(tree.ancestors.sum(-1) - 1)


def test_rows_have_trees_of_their_own_and_padding_is_no_guess() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, PADDING]])
    scores = torch.tensor([[0.0, -0.1, -0.4], [0.0, -0.1, -0.4]])
    tree = TokenTree.from_shape(TreeShape(((0,), (1,))), tokens, scores=scores)
    both = merged(tree, [guess_of("a", -9.0), guess_of("", *())], 3)
    assert both.tokens.tolist() == [[5, 6, 7], [8, 9, PADDING]]
    both = merged(tree, [guess_of("a", -0.2), guess_of("bc", -0.2, -0.3)], 3)
    assert both.tokens.tolist() == [[5, 6, ord("a")], [8, 9, ord("b")]]


def session_after(drafter: WithLookup, *rows: list[int]):
    """A session of a draft model for which rows of one length were committed."""
    tokens = torch.tensor(rows)
    lengths = torch.full((len(rows),), tokens.shape[1] - 1)
    session = drafter.start(tokens[:, :-1], lengths)
    session.commit(Committed(tokens[:, 1:], Features(None, ()), lengths))
    return session


def test_what_followed_a_long_match_fills_the_tree(target, make_drafter) -> None:
    drafter = make_drafter("self+lookup", target)
    rows = [[*range(10, 18), *range(10, 15)], list(range(20, 33))]
    tree = session_after(drafter, *rows).propose(Budget(8, 3), GREEDY, None)
    assert tree.tokens.shape[1] == 8
    assert {15, 16, 17} < {*tree.tokens[0].tolist()}
    alone = session_after(make_drafter("self", target), *rows).propose(Budget(8, 3), GREEDY, None)
    assert [t for t in tree.tokens[1].tolist() if t != PADDING] == alone.tokens[1].tolist()


def test_a_text_without_repetition_leaves_the_whole_tree_to_the_drafter(target, make_drafter):
    rows = [list(range(10, 17)), [20, 21, 20, 22, 20, 23, 20]]  # one token repeats, no two
    alone = session_after(make_drafter("self+lookup", target), *rows)
    tree = alone.propose(Budget(8, 3), GREEDY, None)
    plain = make_drafter("self", target)
    expected = session_after(WithLookup(plain), *rows).session.propose(Budget(8, 3), GREEDY, None)
    assert tree.tokens.equal(expected.tokens)


def test_trees_of_rules_that_draw_have_nothing_of_lookup(target, make_drafter) -> None:
    session = session_after(make_drafter("self+lookup", target), [10, 11, 12, 10, 11])
    random = RowRandom([1], torch.device("cpu"))
    random.begin_step([8])
    assert session.lookup.guesses(Free(8), follows=True).num_nodes > 1
    tree = session.propose(Budget(8, 3), SamplingConfig(temperature=1.0), random)
    assert tree.draft_probs is not None


def test_trees_of_lookup_alone_ask_the_drafter_for_nothing(target, make_drafter) -> None:
    drafter = make_drafter("self+lookup", target)
    session = session_after(drafter, [10, 11, 12, 13, 14, 10, 11])
    session.session.propose = None  # whoever calls it fails
    budget = Free(4)
    assert budget in drafter.budgets and drafter.budgets[-1].levels
    guesses = session.propose(budget, GREEDY, None)
    assert guesses.tree().tokens.tolist() == [[11, 12, 13, 14]]


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


def test_a_head_and_a_draft_model_at_once_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="choose one of head:a and model:b to draft"):
        Decoder.from_pretrained(tmp_path, draft=["head:a", "model:b"])


def test_a_table_that_is_wrong_beside_a_drafter_is_asked_at_one_step_of_16() -> None:
    use = TableUse()
    due = []
    for _ in range(4 * STEPS_WITHOUT):
        due.append(use.is_due(alone=False))
        if due[-1]:
            use.add({1: 0.5, 2: 0.25}, token=3)
    assert due == 4 * [*[False] * (STEPS_WITHOUT - 1), True]
    assert use.share < 0.05


def test_a_table_that_is_right_beside_a_drafter_is_asked_at_every_step() -> None:
    use = TableUse()
    asked = 0
    for _ in range(30 * STEPS_WITHOUT):
        if use.is_due(alone=False):
            asked += 1
            use.add({1: 0.5, 2: 0.25}, token=2 if asked % 4 else 3)
    assert use.share > 0.9 and asked > 2 * 30


@pytest.mark.parametrize("is_right", [True, False])
def test_a_table_gets_nodes_of_a_draft_where_what_it_alone_expects_comes_true(
    target, make_drafter, is_right: bool
) -> None:
    table = NgramTable.of([[10, 11, 12, 40, 41]] * 50, "", 3)
    drafter = WithLookup(make_drafter("self", target), StoreLookup(table))
    for _ in range(3 * STEPS_WITHOUT):
        session = session_after(drafter, [*range(30, 34), 10, 11, 12])
        tree = session.propose(Budget(8, 3), GREEDY, None)
        followed = torch.tensor([[40 if is_right else 50]])
        session.commit(Committed(followed, Features(None, ()), torch.ones(1, dtype=torch.long)))
    assert ({40, 41} <= {*tree.tokens[0].tolist()}) == is_right


def test_rows_that_want_the_table_alone_get_it_beside_rows_where_it_is_wrong(target, make_drafter):
    table = NgramTable.of([[10, 11, 12, 40, 41]] * 50, "", 3)
    drafter = WithLookup(make_drafter("self", target), StoreLookup(table))
    for _ in range(100):
        drafter.table_use.add({40: 0.9}, token=50)
    session = session_after(drafter, *[[*range(30, 34), 10, 11, 12]] * 3)
    session.wanted = [frozenset({"ngrams"}), None, frozenset()]
    tokens = session.propose(Budget(8, 3), GREEDY, None).tokens.tolist()
    own = session.session.propose(Budget(8, 3), GREEDY, None).tokens.tolist()
    assert {40, 41} <= {*tokens[0]} <= {10, 11, 12, 40, 41, PADDING}
    assert {*tokens[1]} == {*own[1]} and 40 not in tokens[1]
    assert {*tokens[2][1:]} == {PADDING}
