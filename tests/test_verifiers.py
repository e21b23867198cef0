"""Acceptance rules on small tables, where every outcome and its probability can be written down."""

from fractions import Fraction
from itertools import permutations

import pytest
import torch

from drafthead.heads.sampling import RowRandom
from drafthead.heads.tree import PADDING, TokenTree, TreeShape
from drafthead.infer.verifiers import VERIFIERS, Acceptance

VOCAB = 4
SHAPES = {
    "chain": TreeShape.chain(2),
    "siblings": TreeShape.from_paths([(0,), (1,), (2,)]),
    "tree": TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)]),
}


class ScriptedRandom(RowRandom):
    """Gives the numbers that a test wants."""

    def __init__(self, numbers: torch.Tensor):
        super().__init__([], torch.device("cpu"))
        self.numbers = numbers  # [B, n]

    def uniform(self, *shape: int) -> torch.Tensor:
        return self.numbers[:, 0] if not shape else self.numbers[:, : shape[0]]


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


def test_typical_prefers_the_longest_then_the_most_probable_path() -> None:
    scores = torch.full((1, 5, VOCAB), 0.25)
    scores[0, 0] = torch.tensor([0.1, 0.3, 0.5, 0.1])
    tree = tree_of(SHAPES["tree"], [0, 1, 2, 3, 3])
    found = accept("typical", tree, scores, torch.tensor([[0.0]]))
    assert found.path[0].tolist() == [0, 2, 4]


# ---- rejection: exact by enumeration ------------------------------------------------------------

Law = dict[int, Fraction]


def table(seed: int, zeros: int) -> list[Law]:
    """Random distributions over the vocabulary, one for each node, with some zero entries."""
    generator = torch.Generator().manual_seed(seed)
    laws = []
    for _ in range(5):
        weights = torch.randint(1, 20, (VOCAB,), generator=generator).tolist()
        for place in torch.randperm(VOCAB, generator=generator)[:zeros].tolist():
            weights[place] = 0
        laws.append({x: Fraction(w, sum(weights)) for x, w in enumerate(weights)})
    return laws


def reject(target: Law, draft: Law, token: int) -> tuple[Law, Law]:
    """norm(max(target - draft, 0)), and draft without the token."""
    left = {x: max(target[x] - draft[x], Fraction(0)) for x in target}
    rest = {x: Fraction(0) if x == token else draft[x] for x in draft}
    mass, draft_mass = sum(left.values()), sum(rest.values())
    target = {x: v / mass for x, v in left.items()} if mass else target
    return target, {x: v / draft_mass for x, v in rest.items()} if draft_mass else rest


def outcomes(
    shape: TreeShape, tokens: list[int], targets: list[Law], drafts: list[Law], node: int = 0
) -> list[tuple[Fraction, list[Fraction], list[bool], int, Law]]:
    """Every way the walk can go: chance, thresholds, decisions, last node, law of the bonus.

    The textbook recursion in exact arithmetic, as a reference that shares no code with ours.
    """
    children = [n for n, parent in enumerate(shape.parents.tolist()) if parent == node]
    target, draft = targets[node], drafts[node]
    found, chance = [], Fraction(1)
    thresholds: list[Fraction] = []
    refused: list[bool] = []
    for child in children:
        token = tokens[child]
        threshold = min(Fraction(1), target[token] / draft[token]) if draft[token] else Fraction(0)
        for deeper in outcomes(shape, tokens, targets, drafts, child):
            found.append((
                chance * threshold * deeper[0],
                [*thresholds, threshold, *deeper[1]],
                [*refused, True, *deeper[2]],
                *deeper[3:],
            ))  # fmt: skip
        chance *= 1 - threshold
        thresholds, refused = [*thresholds, threshold], [*refused, False]
        target, draft = reject(target, draft, token)
    return [*found, (chance, thresholds, refused, node, target)]


def proposals(shape: TreeShape, drafts: list[Law]) -> list[tuple[Fraction, list[int]]]:
    """Every filling of the shape with children drawn without replacement, and its chance."""
    found = [(Fraction(1), [0])]
    for node in range(shape.num_nodes):
        width = shape.parents.tolist().count(node)
        grown = []
        for chance, tokens in found:
            for drawn in permutations(range(VOCAB), width):
                p, mass = chance, Fraction(1)
                for token in drawn:
                    p = p * drafts[node][token] / mass if mass else Fraction(0)
                    mass -= drafts[node][token]
                if p:
                    grown.append((p, [*tokens, *drawn]))
        found = grown
    return found


def law_of_output(shape: TreeShape, targets: list[Law], drafts: list[Law]) -> dict:
    """Exact probability of every committed (tokens) of the reference."""
    law: dict[tuple[int, ...], Fraction] = {}
    for chance, tokens in proposals(shape, drafts):
        for p, _, _, node, bonus in outcomes(shape, tokens, targets, drafts):
            path = []
            while node > 0:
                path.append(tokens[node])
                node = shape.parents.tolist()[node]
            for token, q in bonus.items():
                said = (*reversed(path), token)
                law[said] = law.get(said, Fraction(0)) + chance * p * q
    return law


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("zeros", [0, 1])
def test_the_textbook_recursion_gives_the_targets_law(shape, zeros) -> None:
    """First token: the target's, in exact fractions, whatever the draft."""
    targets, drafts = table(1, zeros), table(2, zeros)
    first: Law = dict.fromkeys(range(VOCAB), Fraction(0))
    for said, chance in law_of_output(shape, targets, drafts).items():
        first[said[0]] += chance
    assert first == targets[0]


def tensors(laws: list[Law], nodes: int) -> torch.Tensor:
    """Distributions [1, N, V] of the first `nodes` nodes."""
    rows = [[float(law[x]) for x in range(VOCAB)] for law in laws[:nodes]]
    return torch.tensor([rows], dtype=torch.float64)


MARGIN = 1e-6


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("zeros", [0, 1])
def test_rejection_decides_at_the_textbook_thresholds(shape, zeros) -> None:
    """For every filling and every way of the walk, coins 1e-6 to either side of each threshold.

    With the test above this makes the rule exact: same thresholds, same law of the bonus.
    """
    targets, drafts = table(1, zeros), table(2, zeros)
    nodes = shape.num_nodes
    scores, draft_probs = tensors(targets, nodes), tensors(drafts, nodes)
    draft_ids = torch.arange(VOCAB).expand(1, nodes, VOCAB)
    checked = 0
    for _, tokens in proposals(shape, drafts):
        tree = TokenTree.from_shape(shape, torch.tensor([tokens]), draft_ids, draft_probs)
        for chance, thresholds, decisions, node, bonus in outcomes(shape, tokens, targets, drafts):
            if not chance:
                continue
            coins = coins_for(shape, thresholds, decisions)
            cumulative = 0.0
            for token, share in bonus.items():
                low, high = cumulative, cumulative + float(share)
                cumulative = high
                if not share:
                    continue
                for u in (low + MARGIN, high - MARGIN):
                    numbers = torch.tensor([[u, *coins]], dtype=torch.float64)
                    found = accept("rejection", tree, scores, numbers)
                    assert found.path[0, found.length[0] - 1].item() == node
                    assert found.bonus.item() == token
                    checked += 1
    assert checked > 20


def coins_for(shape: TreeShape, thresholds: list[Fraction], decisions: list[bool]) -> list[float]:
    """Coins in the rule's own order: `width` for each depth, one for each child that is tried."""
    coins = [0.5] * (shape.depth * shape.width)
    depth = rank = 0
    for threshold, accepted in zip(thresholds, decisions, strict=True):
        coin = float(threshold) - MARGIN if accepted else float(threshold) + MARGIN
        coins[depth * shape.width + rank] = min(max(coin, 0.0), 1.0)
        depth, rank = (depth + 1, 0) if accepted else (depth, rank + 1)
    return coins


def test_children_that_were_not_drawn_are_accepted_with_the_targets_probability() -> None:
    """Equal in law to drawing from the target and looking whether the token was proposed."""
    target = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    tree = tree_of(SHAPES["siblings"], [0, 2, 1, 3])
    scores = target.expand(1, 4, VOCAB)
    # 2 passes below .3; then 1 below .4 / .7; then 3 below .2 / .3; what is left is token 0.
    for coins, node in [
        ([0.299, 0.9, 0.9], 1),
        ([0.301, 0.571, 0.9], 2),
        ([0.301, 0.572, 0.666], 3),
        ([0.301, 0.572, 0.667], 0),
    ]:
        numbers = torch.tensor([[0.5, *coins]], dtype=torch.float64)
        found = accept("rejection", tree, scores, numbers)
        assert found.path[0, found.length[0] - 1].item() == node
    assert found.bonus.item() == 0


def test_padding_is_never_accepted() -> None:
    scores = torch.full((1, 4, VOCAB), 0.25, dtype=torch.float64)
    tree = tree_of(SHAPES["siblings"], [0, PADDING, PADDING, PADDING])
    for name in ("rejection", "typical"):
        found = accept(name, tree, scores, torch.tensor([[0.6, 0.0, 0.0, 0.0]]).double())
        assert (found.length.item(), found.bonus.item()) == (1, 2)


def test_a_root_alone_gives_one_token_of_the_target() -> None:
    scores = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    tree = tree_of(TreeShape.chain(0), [1])
    assert accept("rejection", tree, scores, torch.tensor([[0.25]])).bonus.item() == 1
    assert accept("greedy", tree, scores).bonus.item() == 3
