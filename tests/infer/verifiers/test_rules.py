"""Acceptance rules on examples; the laws of the lossless ones are in test_laws.py."""

from dataclasses import replace

import pytest
import torch
from conftest import ScriptedRandom

from drafthead.contrib.lossy_rules import Typical
from drafthead.core.errors import UserError
from drafthead.core.sampling import NO_TOKEN, draw_without_replacement
from drafthead.core.trees.tree import PADDING, Budget, TokenTree, TreeShape, ancestor_mask
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.engine.step import following_tokens
from drafthead.infer.verifiers import VERIFIERS, Acceptance
from drafthead.infer.verifiers.refusals import earlier_siblings
from drafthead.infer.verifiers.traversal import turns
from drafthead.lab.exactness.exactness import greedy_differences

VOCAB = 4
SHAPES = {"chain": TreeShape.chain(2), "tree": TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])}


def accept(
    name: str, tree: TokenTree, scores: torch.Tensor, numbers: torch.Tensor | None = None
) -> Acceptance:
    random = None if numbers is None else ScriptedRandom(numbers)
    return VERIFIERS[name].rule(tree, scores, random)


def tree_of(shape: TreeShape, tokens: list[int]) -> TokenTree:
    return TokenTree.from_shape(shape, torch.tensor([tokens]))


def certain(tokens: list[int]) -> torch.Tensor:
    """Scores [1, N, V] of a target that is certain of one token behind each node."""
    return torch.eye(VOCAB)[torch.tensor([tokens])]


# ---- greedy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "best", "path", "bonus"),
    [
        # tokens at nodes 0..4; the target's best token behind each node
        ([0, 1, 2, 3, 3], [1, 3, 0, 2, 0], [0, 1, 3], 2),
        ([0, 1, 2, 3, 3], [2, 0, 3, 0, 1], [0, 2, 4], 1),
        ([0, 1, 2, 3, 3], [1, 0, 3, 0, 0], [0, 1], 0),
        ([0, 1, 2, 3, 3], [3, 3, 3, 0, 0], [0], 3),
        ([0, PADDING, 2, 3, 3], [0, 3, 3, 0, 0], [0], 0),
    ],
)
def test_greedy_walks_along_the_targets_best_tokens(tokens, best, path, bonus) -> None:
    found = accept("greedy", tree_of(SHAPES["tree"], tokens), certain(best))
    assert found.path[0, : found.length[0]].tolist() == path
    assert found.length.item() == len(path)
    assert found.bonus.item() == bonus


def test_rows_of_a_batch_are_judged_apart() -> None:
    tree = TokenTree.from_shape(SHAPES["tree"], torch.tensor([[0, 1, 2, 3, 3]] * 2))
    scores = torch.cat([certain([1, 3, 0, 2, 0]), certain([3, 3, 3, 0, 0])])
    found = accept("greedy", tree, scores)
    assert found.length.tolist() == [3, 1]
    assert found.bonus.tolist() == [2, 3]


# ---- typical ------------------------------------------------------------------------------------


def test_typical_accepts_above_the_entropy_threshold() -> None:
    """Uniform over 4: exp(-H) = 1/4, threshold min(.09, .3 / 4) = .075 lets any token pass."""
    tree = tree_of(SHAPES["chain"], [0, 1, 2])
    uniform = torch.full((1, 3, VOCAB), 0.25)
    assert accept("typical", tree, uniform, torch.tensor([[0.6]])).length.item() == 3
    confident = torch.tensor([0.94, 0.03, 0.02, 0.01]).expand(1, 3, VOCAB)
    found = accept("typical", tree, confident, torch.tensor([[0.6]]))
    assert (found.length.item(), found.bonus.item()) == (1, 0)


def test_typical_takes_the_most_probable_bonus_as_medusa_does() -> None:
    scores = torch.tensor([[[0.4, 0.1, 0.2, 0.3]]])
    found = accept("typical", tree_of(TreeShape.chain(0), [1]), scores, torch.tensor([[0.99]]))
    assert found.bonus.item() == 0


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 3),  # threshold min(.09, .3 x exp(-H)) = min(.09, .075)
        ({"typical_delta": 0.9}, 3),  # min(.09, .225)
        ({"typical_epsilon": 0.3}, 3),  # min(.3, .075)
        ({"typical_epsilon": 0.3, "typical_delta": 1.1}, 1),  # min(.3, .275), above .25
    ],
)
def test_the_thresholds_of_typical_are_options(options, length) -> None:
    tree, scores = tree_of(SHAPES["chain"], [0, 1, 2]), torch.full((1, 3, VOCAB), 0.25)
    rule = VERIFIERS["typical"].with_options(options).rule
    assert rule(tree, scores, ScriptedRandom(torch.zeros(1, 1))).length.item() == length
    assert VERIFIERS["typical"].rule == Typical(0.09, 0.3), "the registered rule stays as it is"


def test_lenience_is_an_option_and_exact_at_one() -> None:
    tree, scores, numbers = random_case(drawn=True)
    lengths = {}
    for lenience in (1.0, 0.5, 0.1):
        rule = VERIFIERS["lenient"].with_options({"lenience": lenience}).rule
        lengths[lenience] = rule(tree, scores, ScriptedRandom(numbers)).length.sum().item()
    assert lengths[1.0] == accept("rejection", tree, scores, numbers).length.sum().item()
    assert lengths[1.0] < lengths[0.5] < lengths[0.1]


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("match", {"lenience": 0.5}, "verifier 'match' has no option lenience"),
        ("typical", {"lenience": 0.5}, "verifier 'typical' has no option lenience"),
        ("lenient", {"lenience": 0.0}, "lenience must be above"),
        ("typical", {"typical_epsilon": 1.5}, "typical_epsilon must be at most"),
        ("typical", {"typical_delta": -1.0}, "typical_delta must be at least 0"),
        ("top_k", {"accept_top": 0}, "accept_top must be at least 1, got 0"),
        ("top_k", {"min_block": 0}, "min_block must be at least 1, got 0"),
    ],
)
def test_an_option_that_a_rule_lacks_or_cannot_have_is_refused(name, options, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        VERIFIERS[name].with_options(options)


def test_typical_prefers_the_longest_then_the_most_probable_path() -> None:
    scores = torch.full((1, 5, VOCAB), 0.25)
    scores[0, 0] = torch.tensor([0.1, 0.3, 0.5, 0.1])
    tree = tree_of(SHAPES["tree"], [0, 1, 2, 3, 3])
    found = accept("typical", tree, scores, torch.tensor([[0.0]]))
    assert found.path[0].tolist() == [0, 2, 4]


def test_typical_tells_long_improbable_paths_apart() -> None:
    """The second path is the more probable one, by a ratio of 26 to 24 of some 1e-8."""
    paths = [(first, *[0] * depth) for depth in range(12) for first in (0, 1)]
    shape = TreeShape.from_paths(paths)
    scores = torch.full((1, shape.num_nodes, VOCAB), 0.25)
    scores[0, 0] = torch.tensor([0.24, 0.26, 0.25, 0.25])
    tokens = [0, *(path[0] if len(path) == 1 else 2 for path in shape.paths)]
    found = accept("typical", tree_of(shape, tokens), scores, torch.tensor([[0.0]]))
    assert (found.length.item(), found.path[0, 1].item()) == (13, 2)


# ---- blockwise parallel decoding ----------------------------------------------------------------

# Logits after each node: token 3 first, then 2, 1 and 0. A chain guesses 3, 2 and 0.
DOWNWARDS = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(1, 4, VOCAB)
BLOCK = tree_of(TreeShape.chain(3), [0, 3, 2, 0])
LOSSY_AT_ZERO = sorted(n for n, v in VERIFIERS.items() if v.greedy and not v.lossless)
STRICT = {"top_k": {"accept_top": 1}}


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("top_k", {"accept_top": 1}, [3]),
        ("top_k", {}, [3, 2]),  # the second best of the target
        ("top_k", {"accept_top": 3}, [3, 2]),
        ("top_k", {"accept_top": 4}, [3, 2, 0]),
        ("top_k", {"accept_top": 1, "min_block": 2}, [3]),  # one drafted token and the bonus
        ("top_k", {"accept_top": 1, "min_block": 3}, [3, 2]),
        ("top_k", {"accept_top": 1, "min_block": 9}, [3, 2, 0]),
    ],
)
def test_drafted_tokens_that_are_good_enough_stay_as_they_are(name, options, kept) -> None:
    found = VERIFIERS[name].with_options(options).rule(BLOCK, DOWNWARDS, None)
    assert emitted(BLOCK, found) == [[*kept, 3]]  # the bonus is the most probable token


def test_every_lossy_rule_of_temperature_zero_has_a_strict_form() -> None:
    assert sorted(STRICT) == LOSSY_AT_ZERO


@pytest.mark.parametrize("name", STRICT)
def test_the_strict_form_of_a_lossy_rule_is_greedy(name) -> None:
    """Also where logits are equal: whole numbers often are."""
    tree, scores, _ = random_case(drawn=False)
    strict = VERIFIERS[name].with_options(STRICT[name]).rule
    longest = 0
    for logits in (scores, (8 * scores).round()):
        expected = accept("greedy", tree, logits)
        assert emitted(tree, strict(tree, logits, None)) == emitted(tree, expected)
        longer = accept(name, tree, logits).length
        assert (longer >= expected.length).all() and longer.sum() > expected.length.sum()
        longest = max(longest, expected.length.max().item())
    assert longest == 3, "some leaf is accepted"


def test_of_several_good_paths_the_longest_then_the_most_probable_stays() -> None:
    tree = tree_of(SHAPES["tree"], [0, 2, 3, 3, 2])
    logits = DOWNWARDS[:, :1].expand(1, 5, VOCAB)
    assert accept("top_k", tree, logits).path[0].tolist() in ([0, 1, 3], [0, 2, 4])
    better = logits.clone()
    better[0, 2, 2] = 2.5  # the second path becomes the likelier one
    assert accept("top_k", tree, better).path[0].tolist() == [0, 2, 4]
    shorter = tree_of(SHAPES["tree"], [0, 2, 3, 3, 0])
    assert accept("top_k", shorter, better).path[0].tolist() == [0, 1, 3]


@pytest.mark.parametrize("name", STRICT)
def test_nothing_stays_after_a_node_where_no_token_can_be_chosen(name) -> None:
    logits = DOWNWARDS.clone()
    logits[0, 1] = -torch.inf
    rule = VERIFIERS[name].with_options({"min_block": 4}).rule
    found = rule(BLOCK, logits, None)
    assert (found.length.item(), found.bonus.item()) == (2, NO_TOKEN)


@pytest.mark.parametrize("name", STRICT)
def test_a_lossy_rule_takes_longer_steps_to_another_text(target, make_drafter, name) -> None:
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    prompts, options = [[9, 10, 11], [12, 13]], {"max_new_tokens": 24}
    plain = decoder.generate(prompts, **options)
    strict = decoder.generate(prompts, verifier=name, **STRICT[name], **options)
    assert strict.sequences == plain.sequences
    lossy = decoder.generate(prompts, verifier=name, min_block=3, **options)
    assert lossy.sequences != plain.sequences
    assert min(n for row in lossy.stats.accept_lengths for n in row[:-1]) == 3
    alone = [decoder.generate(p, verifier=name, min_block=3, **options) for p in prompts]
    assert [each.sequences[0] for each in alone] == lossy.sequences


@pytest.mark.parametrize("name", STRICT)
def test_the_test_of_greedy_answers_finds_a_lossy_rule(target, make_drafter, name) -> None:
    decoder = Decoder(target, DraftModel(target, target, depth=3))
    assert greedy_differences(decoder, target, [[9, 10, 11]], 8, verifier=name) == []
    decoder = Decoder(target, make_drafter("draft-model", target), Budget(12, 3))
    found = greedy_differences(decoder, target, [[9, 10, 11], [12, 13]], 24, verifier=name)
    assert found, "a draft of another model"


# ---- every rule --------------------------------------------------------------------

SAMPLING_RULES = sorted(name for name, verifier in VERIFIERS.items() if not verifier.greedy)
# Node 3 hangs under 1 and 4 under 2 in the order of depths; here each subtree stands together.
DEPTH_FIRST = torch.tensor([0, 1, 3, 2, 4])


def random_case(drawn: bool) -> tuple[TokenTree, torch.Tensor, torch.Tensor]:
    """200 random fillings of a tree, target probabilities [200, 5, V] and numbers [200, 7]."""
    shape, rows, vocab = SHAPES["tree"], 200, 6
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, rows, shape.num_nodes, vocab, generator=generator)
    target, draft = logits.double().softmax(-1)
    order = draw_without_replacement(draft, vocab, torch.rand(draft.shape, generator=generator))
    tokens = order[:, shape.parents.clamp_min(0), shape.ranks]
    ids = torch.arange(vocab).expand(draft.shape)
    tree = TokenTree.from_shape(shape, tokens, *((ids, draft) if drawn else (None, None)))
    return tree, target, torch.rand(rows, 7, generator=generator).double()


def emitted(tree: TokenTree, found: Acceptance) -> list[list[int]]:
    """Accepted tokens and bonus of each row."""
    following = following_tokens(tree, found).tolist()
    return [row[:length] for row, length in zip(following, found.length.tolist(), strict=True)]


def pick_nodes(tree: TokenTree, nodes: torch.Tensor, parents: torch.Tensor) -> TokenTree:
    """The given nodes [N] of a tree as a tree with the given parents [N]."""
    supports = [t if t is None else t[:, nodes] for t in (tree.draft_ids, tree.draft_probs)]
    depths = ancestor_mask(parents).sum(-1) - 1
    rows = tree.tokens.shape[0]
    return TokenTree(
        tree.tokens[:, nodes],
        parents.expand(rows, -1),
        depths.expand(rows, -1),
        ancestor_mask(parents).expand(rows, -1, -1),
        int(depths.max()),
        tree.width,
        *supports,
    )


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_the_numbering_of_nodes_does_not_matter(name, drawn) -> None:
    tree, scores, numbers = random_case(drawn)
    expected = emitted(tree, accept(name, tree, scores, numbers))
    moved = pick_nodes(tree, DEPTH_FIRST, torch.tensor([-1, 0, 1, 0, 3]))
    if drawn and VERIFIERS[name].draws_children:  # then each node has its own number
        numbers = numbers[:, DEPTH_FIRST]
    assert emitted(moved, accept(name, moved, scores[:, DEPTH_FIRST], numbers)) == expected


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_padding_is_never_accepted_and_changes_nothing(name, drawn) -> None:
    """The root's first child is padding now, and so is what hangs under a leaf."""
    tree, scores, numbers = random_case(drawn)
    expected = emitted(tree, accept(name, tree, scores, numbers))
    assert max(map(len, expected)) == 3, "some leaf is accepted"
    nodes = torch.tensor([0, 0, 1, 2, 3, 4, 0])
    padded = pick_nodes(tree, nodes, torch.tensor([-1, 0, 0, 0, 2, 3, 4]))
    tokens = padded.tokens.index_fill(1, torch.tensor([1, 6]), PADDING)
    padded = replace(padded, tokens=tokens)
    if drawn and VERIFIERS[name].draws_children:
        numbers = numbers[:, [0, 5, 1, 2, 3, 4, 6]]
    assert emitted(padded, accept(name, padded, scores[:, nodes], numbers)) == expected


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24], ids=["least", "greatest"])
@pytest.mark.parametrize("name", SAMPLING_RULES)
def test_rounding_never_lets_an_impossible_token_through(name, number) -> None:
    """In float32, drafts equal to the target leave nothing when a coin refuses them by rounding."""
    shape = SHAPES["tree"]
    logits = 3 * torch.randn(100, 5, 64, generator=torch.Generator().manual_seed(0))
    kept = logits.topk(8, dim=-1)
    probs = kept.values.softmax(-1)
    scores = torch.zeros_like(logits).scatter(2, kept.indices, probs)
    tokens = kept.indices[:, shape.parents.clamp_min(0), shape.ranks]
    tree = TokenTree.from_shape(shape, tokens, kept.indices, probs)
    found = accept(name, tree, scores, torch.full((100, 5), number))
    last = found.path.gather(1, found.length[:, None] - 1)
    assert (scores[torch.arange(100), last.squeeze(1), found.bonus] > 0).all()


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_a_root_alone_gives_one_token_of_the_target(name) -> None:
    scores = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    tree = tree_of(TreeShape.chain(0), [1])
    found = accept(name, tree, scores, torch.tensor([[0.25]]))
    assert found.length.item() == 1
    best = VERIFIERS[name].greedy or name == "typical"
    assert found.bonus.item() == (3 if best else 1)


def test_traversal_tries_each_node_after_all_that_hangs_below_it() -> None:
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3])  # 0 (1 (3 (6) 4) 2 (5))
    tree = pick_nodes(tree_of(TreeShape.chain(6), list(range(7))), torch.arange(7), parents)
    order = turns(tree, earlier_siblings(tree))[0].argsort()
    assert order.tolist() == [6, 3, 4, 1, 5, 2, 0]
