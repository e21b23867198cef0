"""Lossless rules are lossless: proved by enumeration, in exact fractions.

Each rule has a textbook here: the published algorithm, written naively and sharing no code with
ours, that lists every outcome with the box of uniform numbers that leads to it. Two things are
shown. The textbook's outcomes, over all fillings of a tree, have exactly the target's law; and our
rule decides as the textbook does in the corners of every box. So its law is the target's too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise, product

import pytest
import torch
from conftest import ScriptedRandom

from drafthead.contrib.lossy_rules import Lenient
from drafthead.core.sampling import SamplingConfig, draft_distribution
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.heads.growing.levels import Guess, Nodes, filled_tree, levels_of
from drafthead.infer.engine.step import following_tokens
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.goodness_of_fit import chance_of_worse, fit
from drafthead.lab.exactness.rule_law import OneStream

VOCAB = 4
SHAPES = {
    "chain": TreeShape.chain(3),
    "siblings": TreeShape.from_paths([(0,), (1,), (2,)]),
    "bushy": TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "deep": TreeShape.from_paths([(0,), (1,), (1, 0), (1, 0, 0), (1, 0, 1)]),
}
# Rules that promise the target's law; a new one needs a textbook below.
LOSSLESS = sorted(n for n, v in VERIFIERS.items() if v.lossless and not v.greedy)
MARGIN = 1e-9  # how far from a box's faces its corners are taken

Law = list[Fraction]  # a probability for each token
Prefix = tuple[int, ...]  # the tokens behind the root
Table = dict[Prefix, Law]  # a model: the law of the token behind each prefix
Bounds = dict[int, tuple[Fraction, Fraction]]  # number's place -> where it must lie


@dataclass(frozen=True)
class Outcome:
    """What a rule accepts when the uniform numbers lie in a box; others may be anything."""

    bounds: Bounds
    node: int  # the last accepted
    bonus: int

    @property
    def chance(self) -> Fraction:
        chance = Fraction(1)
        for low, high in self.bounds.values():
            chance *= high - low
        return chance

    @property
    def thickness(self) -> Fraction:
        """The length of the box's shortest edge."""
        return min((high - low for low, high in self.bounds.values()), default=Fraction(1))


# ---- textbooks ----------------------------------------------------------------------------------


def normalised(weights: Law) -> Law:
    return [weight / sum(weights) for weight in weights] if sum(weights) else weights


def without(law: Law, token: int) -> Law:
    return normalised([Fraction(0) if x == token else p for x, p in enumerate(law)])


def surplus(target: Law, draft: Law) -> Law:
    return [max(p - q, Fraction(0)) for p, q in zip(target, draft, strict=True)]


def scaled(law: Law, factor: Fraction) -> Law:
    return [factor * p for p in law]


def ratio(target: Law, draft: Law, token: int) -> Fraction:
    """min(1, target / draft); a token without draft probability cannot have been drawn."""
    return min(Fraction(1), target[token] / draft[token]) if draft[token] else Fraction(0)


def cells(law: Law) -> list[tuple[int, tuple[Fraction, Fraction]]]:
    """The tokens and the intervals of [0, 1) that draw them."""
    edges = pairwise(accumulate(law, initial=Fraction(0)))
    return [(token, cell) for token, cell in enumerate(edges) if cell[0] < cell[1]]


def children_of(shape: TreeShape, node: int) -> list[int]:
    return [n for n, parent in enumerate(shape.parents.tolist()) if parent == node]


@dataclass(frozen=True)
class Proposal:
    """A filled tree with the laws of target and draft behind each node.

    Without drafts a child counts as drawn from a law that is certain of it.
    """

    shape: TreeShape
    tokens: list[int]
    targets: list[Law]
    drafts: list[Law] | None

    def draft(self, drafts: list[Law] | None, child: int) -> Law:
        if drafts is not None:
            return drafts[self.shape.parents[child]]
        return [Fraction(x == self.tokens[child]) for x in range(VOCAB)]


def with_bonus(bounds: Bounds, node: int, law: Law) -> Iterator[Outcome]:
    for token, cell in cells(law):
        yield Outcome({**bounds, 0: cell}, node, token)


def match(proposal: Proposal, node: int = 0, bounds: Bounds | None = None) -> Iterator[Outcome]:
    """Draw from the target; go on where the token is proposed. The draw at depth d is number d."""
    bounds = bounds or {}
    children = {proposal.tokens[n]: n for n in children_of(proposal.shape, node)}
    for token, cell in cells(proposal.targets[node]):
        here = {**bounds, len(bounds): cell}
        if token in children:
            yield from match(proposal, children[token], here)
        else:
            yield Outcome(here, node, token)


def rejection(
    proposal: Proposal,
    lenience: Fraction = Fraction(1),
    node: int = 0,
    bounds: Bounds | None = None,
) -> Iterator[Outcome]:
    """Try child after child; node n has number n, the bonus number 0."""
    bounds, drafts = bounds or {}, proposal.drafts and list(proposal.drafts)
    target = proposal.targets[node]
    for child in children_of(proposal.shape, node):
        token, draft = proposal.tokens[child], proposal.draft(drafts, child)
        threshold = ratio(target, scaled(draft, lenience), token)
        taken = {**bounds, child: (Fraction(0), threshold)}
        yield from rejection(proposal, lenience, child, taken)
        if threshold == 1:
            return
        bounds = {**bounds, child: (threshold, Fraction(1))}
        left = surplus(target, draft)
        target = normalised(left) if sum(left) else target
        if drafts is not None:
            drafts[node] = without(draft, token)
    yield from with_bonus(bounds, node, target)


def traversal(proposal: Proposal) -> Iterator[Outcome]:
    """Algorithm of arXiv 2505.12398: go to the first leaf; if it fails delete it and go on.

    Node n has number n, the bonus number 0.
    """
    shape, targets = proposal.shape, list(proposal.targets)
    drafts = proposal.drafts and list(proposal.drafts)
    waiting = {node: children_of(shape, node) for node in range(shape.num_nodes)}
    weight = {0: Fraction(1)}
    bounds: Bounds = {}
    node = 0
    while True:
        while waiting[node]:
            child = waiting[node][0]
            weighted = scaled(targets[node], weight[node])
            weight[child] = ratio(weighted, proposal.draft(drafts, child), proposal.tokens[child])
            node = child
        if node == 0:
            yield from with_bonus(bounds, 0, targets[0])
            return
        yield from with_bonus({**bounds, node: (Fraction(0), weight[node])}, node, targets[node])
        bounds[node] = (weight[node], Fraction(1))
        parent = shape.parents[node].item()
        draft = proposal.draft(drafts, node)
        left = surplus(scaled(targets[parent], weight[parent]), draft)
        if sum(left) + 1 - weight[parent] == 0:
            return  # draft and target agree: some child has been accepted
        weight[parent] = sum(left) / (sum(left) + 1 - weight[parent])
        targets[parent] = normalised(left)
        if drafts is not None:
            drafts[parent] = without(draft, proposal.tokens[node])
        waiting[parent].pop(0)
        node = parent


def block(proposal: Proposal) -> Iterator[Outcome]:
    """Block verification of a chain (arXiv 2403.10444): accept the largest i that passes.

    P_i = min(P_(i-1) target / draft, 1); h_i = R_i / (R_i + 1 - P_i) with R_i the mass of
    max(P_i target - draft, 0); the last h is P.
    """
    assert proposal.drafts is not None
    chain, targets, drafts = proposal.shape.depth, proposal.targets, proposal.drafts
    joint = [Fraction(1)]
    for i in range(1, chain + 1):
        weighted = scaled(targets[i - 1], joint[-1])
        joint.append(ratio(weighted, drafts[i - 1], proposal.tokens[i]))
    bounds: Bounds = {}
    for i in range(chain, -1, -1):
        left = surplus(scaled(targets[i], joint[i]), drafts[i]) if i < chain else targets[i]
        spread = sum(left) + 1 - joint[i]
        passes = joint[i] if i == chain else sum(left) / spread if spread else Fraction(1)
        yield from with_bonus({**bounds, i: (Fraction(0), passes)}, i, normalised(left))
        bounds[i] = (passes, Fraction(1))


Textbook = Callable[[Proposal], Iterator[Outcome]]
TEXTBOOKS: dict[str, Textbook] = {
    "match": match,
    "rejection": rejection,
    "traversal": traversal,
    "lenient": lambda proposal: rejection(proposal, Fraction(Lenient.lenience)),
}


def textbook(name: str, drawn: bool) -> Textbook:
    """Children that were not drawn are matched by every rule."""
    return TEXTBOOKS[name] if drawn else match


# ---- tables and fillings ------------------------------------------------------------------------


@cache
def table(seed: int, zeros: int) -> Table:
    """A random model of prefixes of up to 3 tokens, with some zero entries in each law."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for length in range(4):
        for prefix in product(range(VOCAB), repeat=length):
            weights = torch.randint(1, 20, (VOCAB,), generator=generator).tolist()
            for place in torch.randperm(VOCAB, generator=generator)[:zeros].tolist():
                weights[place] = 0
            found[prefix] = [Fraction(weight, sum(weights)) for weight in weights]
    return found


def models(seed: int, zeros: int) -> tuple[Table, Table]:
    """Target and draft; a law has `zeros` zero entries in the draft, half as many in the target."""
    return table(seed, zeros // 2), table(seed + 1, zeros)


def draws(law: Law, count: int, drawn: Prefix = ()) -> Iterator[tuple[Fraction, Prefix]]:
    """Every sequence of `count` draws without replacement; fillers once nothing is left to draw."""
    if count == 0:
        yield Fraction(1), drawn
        return
    chances = {x: p for x, p in enumerate(law) if p}
    if not chances:
        fillers = set(range(VOCAB)) - set(drawn)
        chances = dict.fromkeys(fillers, Fraction(1, len(fillers)))
    for token, chance in chances.items():
        for rest, sequence in draws(without(law, token), count - 1, (*drawn, token)):
            yield chance * rest, sequence


def best(law: Law, count: int) -> Iterator[tuple[Fraction, Prefix]]:
    """The `count` most probable tokens, chosen and not drawn."""
    yield Fraction(1), tuple(sorted(range(VOCAB), key=lambda token: -law[token])[:count])


Filling = tuple[Fraction, Proposal, list[Prefix]]


@cache
def proposals(shape: TreeShape, seed: int, zeros: int, drawn: bool) -> list[Filling]:
    """The fillings of a shape by random models."""
    return fillings(models(seed, zeros), shape, drawn)


def fillings(tables: tuple[Table, Table], shape: TreeShape, drawn: bool) -> list[Filling]:
    """Every filling of a shape with its chance, and the prefix that ends with each node."""
    target, draft = tables
    found: list[tuple[Fraction, list[Prefix]]] = [(Fraction(1), [()])]
    for node in range(shape.num_nodes):
        width = len(children_of(shape, node))
        found = [
            (chance * p, [*prefixes, *((*prefixes[node], token) for token in tokens)])
            for chance, prefixes in found
            for p, tokens in (draws if drawn else best)(draft[prefixes[node]], width)
        ]
    return [
        (
            chance,
            Proposal(
                shape,
                [0, *(prefix[-1] for prefix in prefixes[1:])],
                [target[prefix] for prefix in prefixes],
                [draft[prefix] for prefix in prefixes] if drawn else None,
            ),
            prefixes,
        )
        for chance, prefixes in found
    ]


def law_of_answers(book: Textbook, shape: TreeShape, seed: int, zeros: int, drawn: bool) -> dict:
    """Exact probability of all that one step may emit: accepted tokens and bonus."""
    law: dict[Prefix, Fraction] = {}
    for chance, proposal, prefixes in proposals(shape, seed, zeros, drawn):
        for outcome in book(proposal):
            emitted = (*prefixes[outcome.node], outcome.bonus)
            law[emitted] = law.get(emitted, Fraction(0)) + chance * outcome.chance
    return law


# ---- the proofs ---------------------------------------------------------------------------------

any_tree = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
any_zeros = pytest.mark.parametrize("zeros", [0, 2])
any_filling = pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])


@any_filling
@any_zeros
@any_tree
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_rules_textbook_has_exactly_the_targets_law(name, shape, zeros, drawn) -> None:
    emitted = law_of_answers(textbook(name, drawn), shape, 1, zeros, drawn)
    target, _ = models(1, zeros)
    plain = {(token,): p for token, p in enumerate(target[()])}
    assert continued(emitted, target, shape.depth + 1) == continued(plain, target, shape.depth + 1)


def continued(
    emitted: dict[Prefix, Fraction], target: Table, length: int
) -> dict[Prefix, Fraction]:
    """The law of the first `length` tokens when the target goes on after what was emitted."""
    law = {text: Fraction(0) for text in product(range(VOCAB), repeat=length)}
    for text in law:
        rest = Fraction(1)
        for place in range(length, 0, -1):
            law[text] += emitted.get(text[:place], Fraction(0)) * rest
            rest *= target[text[: place - 1]][text[place - 1]]
    return law


@any_filling
@any_zeros
@any_tree
@pytest.mark.parametrize("name", sorted(TEXTBOOKS))
def test_a_rule_decides_as_its_textbook(name, shape, zeros, drawn) -> None:
    check_decisions(name, textbook(name, drawn), proposals(shape, 1, zeros, drawn))


@any_zeros
def test_on_a_chain_traversal_is_block_verification(zeros) -> None:
    check_decisions("traversal", block, proposals(SHAPES["chain"], 1, zeros, drawn=True))


def check_decisions(name: str, book: Textbook, fillings: list[Filling]) -> None:
    """For every filling and outcome, with numbers within 1e-9 of the faces of the outcome's box."""
    cases, numbers, expected = [], [], []
    generator = torch.Generator().manual_seed(0)
    for _, proposal, _ in fillings:
        outcomes = [outcome for outcome in book(proposal) if outcome.chance]
        assert sum(outcome.chance for outcome in outcomes) == 1, "the boxes fill the cube"
        thick = [outcome for outcome in outcomes if outcome.thickness > 2 * MARGIN]
        assert sum(outcome.chance for outcome in thick) > 1 - 1e-6
        for outcome, upper in product(thick, (False, True)):
            cases.append(proposal)
            expected.append((outcome.node, outcome.bonus))
            numbers.append(torch.rand(proposal.shape.num_nodes, generator=generator).double())
            for place, (low, high) in outcome.bounds.items():
                numbers[-1][place] = float(high) - MARGIN if upper else float(low) + MARGIN
    tree, scores = tensors(cases)
    found = VERIFIERS[name].rule(tree, scores, ScriptedRandom(torch.stack(numbers)))
    last = found.path.gather(1, found.length[:, None] - 1).squeeze(1)
    assert list(zip(last.tolist(), found.bonus.tolist(), strict=True)) == expected


def tensors(proposals: list[Proposal]) -> tuple[TokenTree, torch.Tensor]:
    """A batch of proposals as one tree, and target probabilities [B, N, V] in float64.

    Drafts with zero entries get a support that is shorter than the vocabulary, by one token.
    """

    def laws(of_node: list[list[Law]]) -> torch.Tensor:
        as_floats = [[[float(p) for p in law] for law in laws] for laws in of_node]
        return torch.tensor(as_floats, dtype=torch.float64)

    shape, tokens = proposals[0].shape, torch.tensor([proposal.tokens for proposal in proposals])
    scores = laws([proposal.targets for proposal in proposals])
    if proposals[0].drafts is None:
        return TokenTree.from_shape(shape, tokens), scores
    draft_probs = laws([proposal.drafts for proposal in proposals])
    support = draft_probs.topk(VOCAB - 1 if (draft_probs == 0).any() else VOCAB, dim=-1)
    return TokenTree.from_shape(shape, tokens, support.indices, support.values), scores


# ---- drafts that are almost certain -------------------------------------------------------------

TRIALS, FALSE_ALARM = 100_000, 1e-6  # the odds of each case to fail by chance; the seed is fixed
STEEP = (60, 80, 90, 95, 100, 110, 400, 600)  # best logit less the next, over temperature


def steep_logits(gap: float) -> torch.Tensor:
    """Draft logits [V] at temperature 1: one far ahead, two almost equal, one far behind."""
    return torch.tensor([0.0, -gap, -gap - 1, -gap - 40])


@pytest.mark.parametrize(
    ("gap", "temperature"), [*((gap, 1.0) for gap in STEEP), (95, 0.1), (95, 0.01)]
)
@pytest.mark.parametrize("name", LOSSLESS)
def test_almost_certain_drafts_leave_the_targets_law(name, gap, temperature) -> None:
    """Trees filled as the drafters fill them; the target draws each token uniformly."""
    shape, generator = SHAPES["bushy"], torch.Generator().manual_seed(0)
    random = OneStream(TRIALS, generator)

    def expand(nodes: Nodes) -> Guess:
        ids = (nodes.tokens[..., None] + torch.arange(VOCAB)) % VOCAB  # the best: the parent's
        logits = (temperature * steep_logits(gap)).expand(ids.shape)
        return Guess(nodes.states, logits, ids, nodes.states)

    levels = levels_of(shape, torch.device("cpu"))
    roots, sampling = torch.zeros(TRIALS, dtype=torch.long), SamplingConfig(temperature)
    states = torch.zeros(TRIALS, 1, 0)
    tree = filled_tree(shape, levels, roots, states, expand, sampling, random)
    scores = torch.full((TRIALS, shape.num_nodes, VOCAB), 1 / VOCAB)
    found = VERIFIERS[name].rule(tree, scores, random)
    text = following_tokens(tree, found)
    plain = torch.randint(VOCAB, text.shape, generator=generator)
    text = torch.where(torch.arange(3) < found.length[:, None], text, plain)
    counts = torch.bincount(text @ torch.tensor([16, 4, 1]), minlength=64)
    assert chance_of_worse([fit(counts, torch.full((64,), 1 / 64))]) > FALSE_ALARM


@any_tree
@pytest.mark.parametrize("gap", STEEP)
@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_a_rule_decides_as_its_textbook_after_almost_certain_drafts(name, gap, shape) -> None:
    """Every filling, the least probable ones too, with the very numbers that children are drawn by.

    Outcomes of less than 2e-9 are left out: doubles do not hold a number near both their faces.
    """
    steep = draft_distribution(steep_logits(gap), SamplingConfig(1.0)).tolist()
    draft = normalised([Fraction(p) for p in steep])
    target, _ = models(1, 0)
    tables = target, {prefix: draft[-n:] + draft[:-n] for n, prefix in enumerate(target)}
    check_decisions(name, TEXTBOOKS[name], fillings(tables, shape, True))


# ---- what is claimed beside exactness -----------------------------------------------------------


@any_tree
@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_certain_drafts_are_accepted_as_if_they_were_matched(name, shape) -> None:
    """The reason why children that were not drawn may be matched by every rule."""
    assert law_of_answers(TEXTBOOKS[name], shape, 1, 0, drawn=False) == law_of_answers(
        match, shape, 1, 0, drawn=False
    )


def expected_tokens(name: str, shape: TreeShape, seed: int, drawn: bool = True) -> Fraction:
    """Mean number of tokens that a step commits."""
    emitted = law_of_answers(TEXTBOOKS[name], shape, seed, 0, drawn)
    return sum((len(tokens) * chance for tokens, chance in emitted.items()), Fraction(0))


def test_traversal_accepts_no_less_of_a_chain_than_rejection() -> None:
    gains = [
        expected_tokens("traversal", SHAPES["chain"], seed)
        - expected_tokens("rejection", SHAPES["chain"], seed)
        for seed in range(10)
    ]
    assert min(gains) >= 0
    assert max(gains) > 0.01


@any_tree
def test_lenient_makes_no_token_more_probable_than_it_promises(shape) -> None:
    """Behind every prefix at most 1 / lenience times the target's probability."""
    (target, _), length = models(1, 0), shape.depth + 1
    emitted = law_of_answers(TEXTBOOKS["lenient"], shape, 1, 0, drawn=True)
    law, most = continued(emitted, target, length), Fraction(1)
    assert sum(law.values()) == 1
    for size in range(length):
        for prefix in product(range(VOCAB), repeat=size):
            after = [
                sum(p for text, p in law.items() if text[: size + 1] == (*prefix, token))
                for token in range(VOCAB)
            ]
            found = zip(normalised(after), target[prefix], strict=True)
            most = max(most, *(p / expected for p, expected in found))
    assert 1 < most <= 1 / Fraction(Lenient.lenience)
