"""What every head family owes training and decoding.

conftest.py runs what asks for a `family` once for each head family, and what asks for a
`drafter_name` once for each drafter.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from alone import Alone
from architectures import ARCHITECTURES, OTHERS, tiny_model
from drafters import NO_HEADS, make_head
from stages import more
from tiny import VOCAB

from drafthead.core.drafting.drafter import Committed, Drafter, Ends
from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import known
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.families.by_depth import HeadByDepth
from drafthead.heads.families.head_drafter import drafter_for, register_head_drafter
from drafthead.heads.families.medusa.head import MedusaHeads
from drafthead.heads.formats.drafthead import save_head
from drafthead.heads.formats.loading import load_head
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch
from drafthead.heads.objectives.losses import TOKEN_LOSSES
from drafthead.infer import Decoder
from drafthead.train.learning.ranks import chain_lengths

GREEDY, WARM = SamplingConfig(), SamplingConfig(temperature=1.0, top_k=20)


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, VOCAB, (rows, length), generator=generator)


def features_of(target: Target, drafter: Drafter | DraftHead, ids: torch.Tensor) -> Features:
    """What the drafter reads of the target at all places of ids [B, T]."""
    spec = drafter.features_needed if isinstance(drafter, DraftHead) else drafter.features
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return target.run(ids, positions, None, spec.with_last()).features


def training_batch(target: Target, head: DraftHead) -> HeadBatch:
    """What the target says to four prompts of three tokens."""
    prompts = random_ids(4, 3)
    ids = target.model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=21,
        max_new_tokens=21,
    )
    supervised = torch.ones_like(ids, dtype=torch.bool)
    supervised[:, :3] = False
    return HeadBatch(ids, torch.ones_like(ids), supervised, features_of(target, head, ids))


def fresh(family: str, target: Target, **options: object) -> DraftHead:
    torch.manual_seed(0)
    cls = HEADS[family]
    head = cls(cls.sized(cls.config_class(**options), target))
    head.prepare(torch.ones(target.vocab_size, dtype=torch.long))
    head.initialize(target)
    return head


@cache
def trained(family: str, target: Target) -> tuple[DraftHead, list[float]]:
    """A head fitted to `training_batch`, and its losses on the way."""
    head = fresh(family, target)
    batch = training_batch(target, head)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    curve = []
    for step in range(60):
        torch.manual_seed(step)
        total = head.loss(batch, target).total / batch.supervised.sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        curve.append(total.item())
    return head.eval().requires_grad_(False), curve


# Training


def test_a_head_learns(family: str, target: Target):
    _, curve = trained(family, target)
    assert curve[-1] < 0.7 * curve[0]


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_every_loss_reaches_every_parameter(family: str, target: Target, loss: str):
    """A parameter without a gradient would stop training in several processes."""
    head = fresh(family, target, loss=loss)
    head.loss(training_batch(target, head), target).total.backward()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_a_batch_without_supervised_tokens_has_no_loss_and_no_ranks(family: str, target: Target):
    head = fresh(family, target)
    batch = training_batch(target, head)
    nothing = torch.zeros_like(batch.supervised)
    loss = head.loss(HeadBatch(batch.input_ids, batch.segments, nothing, batch.features), target)
    assert loss.total.item() == 0
    assert loss.ranks.shape == (0, head.depth)
    loss.total.backward()


def test_the_ranks_of_training_tell_what_drafting_proposes(family: str, target: Target):
    """Right guesses in a row behind each anchor, by ranks and by drafting a chain there."""
    head, _ = trained(family, target)
    batch = training_batch(target, head)
    ranks = head.loss(batch, target).ranks
    assert ((ranks >= 0) & (ranks <= MAX_RANK)).all()
    length, depth = batch.input_ids.shape[1], head.depth
    anchors = torch.arange(2, length - 1).repeat(4)  # the root is supervised from token 3 on
    rows = torch.arange(4).repeat_interleave(length - 3)
    ids = batch.input_ids[rows]
    drafter = drafter_for(head, target, TreeShape.chain(depth))
    session = drafter.start(ids, anchors + 1)
    features = batch.features.map(lambda hidden: hidden[rows])
    session.commit(piece(ids, features, torch.zeros_like(anchors), anchors + 1))
    drafted = session.propose(drafter.budgets[-1], GREEDY, None).tokens[:, 1:]
    places = anchors[:, None] + 2 + torch.arange(depth)
    right = drafted == ids.gather(1, places.clamp_max(length - 1))
    found = (right & (places < length)).long().cumprod(1).sum(1)
    assert sorted(found.tolist()) == sorted(chain_lengths(ranks).tolist())
    assert found.float().mean() > 0.5, "a head that is never right tests nothing"


# Drafting


def piece(
    ids: torch.Tensor, features: Features, starts: torch.Tensor, ends: torch.Tensor
) -> Committed:
    """Positions starts to ends [B] of each row of ids [B, T] as a pass would commit them."""
    lengths = ends - starts
    places = starts[:, None] + torch.arange(int(lengths.max()))
    places = places.clamp_max(ids.shape[1] - 2)
    rows = torch.arange(ids.shape[0])[:, None]
    return Committed(ids.gather(1, places + 1), features.map(lambda h: h[rows, places]), lengths)


def propose(drafter: Drafter, session, sampling: SamplingConfig, seeds: list[int]) -> TokenTree:
    """The tree of the drafter's largest budget, drawn if the sampling is not greedy."""
    random = None if sampling.greedy else RowRandom(seeds, torch.device("cpu"))
    if random is not None:
        random.begin_step([0] * len(seeds))
    return known(session.propose(drafter.budgets[-1], sampling, random))


def assert_same_tree(found: TokenTree, expected: TokenTree) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.parents, expected.parents)
    if expected.draft_probs is not None:
        torch.testing.assert_close(found.draft_probs, expected.draft_probs, atol=1e-5, rtol=1e-4)


IDS = random_ids(3, 30, seed=1)
# Where each row stands after the prompt and after each of four steps.
PLACES = torch.tensor([[5, 12, 2], [6, 15, 3], [9, 16, 7], [10, 20, 8], [14, 21, 12]])


def start(drafter: Drafter, target: Target, rows: list[int], until: torch.Tensor):
    """A session that was given rows of IDS as prompts of the lengths `until` [R] at once."""
    ids = IDS[rows]
    session = Alone(drafter, target, ids[:, : int(until.max())], until)
    features = features_of(target, drafter, ids)
    session.commit(piece(ids, features, torch.zeros_like(until), until))
    return session


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["best", "drawn"])
def test_drafting_step_by_step_equals_drafting_from_scratch(
    target: Target, make_drafter, drafter_name: str, sampling: SamplingConfig
):
    drafter = make_drafter(drafter_name, target)
    session = start(drafter, target, [0, 1, 2], PLACES[0])
    features = features_of(target, drafter, IDS)
    for step, (before, after) in enumerate(pairwise(PLACES)):
        if step != 2:  # a step may pass without a proposal
            propose(drafter, session, sampling, [1, 2, 3])
        session.commit(piece(IDS, features, before, after))
    found = propose(drafter, session, sampling, [1, 2, 3])
    scratch = start(drafter, target, [0, 1, 2], PLACES[-1])
    assert_same_tree(found, propose(drafter, scratch, sampling, [1, 2, 3]))


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["best", "drawn"])
def test_rows_of_a_batch_do_not_influence_each_other(
    target: Target, make_drafter, drafter_name: str, sampling: SamplingConfig
):
    drafter = make_drafter(drafter_name, target)
    together = start(drafter, target, [0, 1, 2], PLACES[0])
    together.keep_rows(torch.tensor([2, 0]))
    features = features_of(target, drafter, IDS)
    kept = features.map(lambda hidden: hidden[[2, 0]])
    together.commit(piece(IDS[[2, 0]], kept, PLACES[0, [2, 0]], PLACES[2, [2, 0]]))
    tree = propose(drafter, together, sampling, [3, 1])
    for place, row in enumerate([2, 0]):
        alone = propose(
            drafter, start(drafter, target, [row], PLACES[2, [row]]), sampling, [row + 1]
        )
        # Prompt lookup pads a row that proposes less than the others.
        nodes = alone.num_nodes
        assert torch.equal(tree.tokens[place, :nodes], alone.tokens[0])
        assert (tree.tokens[place, nodes:] < 0).all()
        assert torch.equal(tree.parents[place, :nodes], alone.parents[0])
        if alone.draft_probs is not None:
            assert tree.draft_probs is not None
            # The logits behind these float64 numbers are float32.
            probs = tree.draft_probs[place, :nodes].float()
            torch.testing.assert_close(probs, alone.draft_probs[0].float())


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["best", "drawn"])
@pytest.mark.parametrize("joining", [[2, 1], [2, 1, 3], [1, 2, 3]], ids=str)
def test_rows_that_join_are_drafted_for_as_from_the_beginning(
    target: Target, make_drafter, drafter_name: str, sampling: SamplingConfig, joining: list[int]
):
    drafter = make_drafter(drafter_name, target)
    session = start(drafter, target, [0, 1], PLACES[0, [0, 1]])
    features = features_of(target, drafter, IDS)
    for before, after in pairwise(PLACES[:3]):  # two commits that are not read yet
        kept = features.map(lambda hidden: hidden[[0, 1]])
        session.commit(piece(IDS[[0, 1]], kept, before[[0, 1]], after[[0, 1]]))
    # The first newcomer takes the place of row 0, which has ended.
    session.join_rows(start(drafter, target, [2, 0], PLACES[1, [2, 0]]), joining)
    order = [[0, 1, 2, 0][row] for row in joining]
    places = torch.cat([PLACES[2, [0, 1]], PLACES[1, [2, 0]]])[joining]
    last = features.map(lambda hidden: hidden[order])
    session.commit(piece(IDS[order], last, places, PLACES[4, order]))
    expected = start(drafter, target, order, PLACES[4, order])
    seeds = list(range(len(order)))
    found = propose(drafter, session, sampling, seeds)
    assert_same_tree(found, propose(drafter, expected, sampling, seeds))


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["best", "drawn"])
def test_proposals_keep_to_the_budget_and_say_where_their_children_come_from(
    target: Target, make_drafter, drafter_name: str, sampling: SamplingConfig
):
    drafter = make_drafter(drafter_name, target)
    session = start(drafter, target, [0, 1, 2], PLACES[0])
    roots = IDS.gather(1, PLACES[0][:, None])[:, 0]
    random = None if sampling.greedy else RowRandom([1, 2, 3], torch.device("cpu"))
    for budget in drafter.budgets:
        if random is not None and not budget.levels and drafter.budgets[-1].levels:
            continue  # free drafts beside others are not drawn
        tree = known(session.propose(budget, sampling, random))
        assert tree.num_nodes <= budget.nodes
        deepest = budget.nodes - 1 if "+" in drafter_name else budget.depth  # of lookup
        assert int(tree.depths.max()) <= tree.max_depth <= deepest
        assert torch.equal(tree.tokens[:, 0], roots)
        check_children(tree)
        if random is not None and drafter_name not in NO_HEADS:
            check_supports(tree)


def check_children(tree: TokenTree) -> None:
    """Parents stand before children and siblings differ."""
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
        edges = [edge for edge in zip(parents, tokens, strict=True) if edge[1] >= 0]
        assert len(set(edges)) == len(edges)
        children = [parents.count(node) for node in range(len(parents))]
        assert max(children) <= tree.width


def check_supports(tree: TokenTree) -> None:
    """Each node has a distribution, and its children are among the tokens of that."""
    assert tree.draft_ids is not None and tree.draft_probs is not None
    assert tree.draft_ids.shape == tree.draft_probs.shape
    assert tree.draft_ids.shape[:2] == tree.tokens.shape
    assert (tree.draft_probs >= 0).all()
    torch.testing.assert_close(tree.draft_probs.sum(-1), torch.ones(tree.tokens.shape).double())
    of_parent = tree.draft_ids.gather(
        1, tree.parents[:, 1:, None].expand(-1, -1, tree.draft_ids.shape[-1])
    )
    is_child = (of_parent == tree.tokens[:, 1:, None]).any(-1)
    assert (is_child | (tree.tokens[:, 1:] < 0)).all()


# On disk


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["best", "drawn"])
def test_a_saved_and_loaded_head_proposes_the_same(
    family: str, target: Target, tmp_path, sampling: SamplingConfig
):
    head, _ = trained(family, target)
    save_head(head, tmp_path, target, "target", {}, torch.float32)
    trees = []
    for one in (head, load_head(tmp_path, target)):
        drafter = drafter_for(one, target)
        session = start(drafter, target, [0, 1, 2], PLACES[0])
        trees.append(propose(drafter, session, sampling, [1, 2, 3]))
    assert_same_tree(trees[1], trees[0])


def test_what_was_committed_knows_its_ends_and_can_be_cut_to_what_is_used() -> None:
    tokens = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]])
    hidden = torch.arange(20.0).view(2, 5, 2)
    committed = Committed(tokens, Features(hidden), torch.tensor([3, 2]), width=3)
    cut = committed.cut()
    assert cut.tokens.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert cut.features.last is not None and cut.features.last.stride() == (6, 2, 1)
    assert cut.cut() is cut
    for part in (committed, cut):
        assert part.ends.roots.tolist() == [3, 5]
        assert part.ends.hidden is not None
        assert part.ends.hidden.tolist() == [[4.0, 5.0], [12.0, 13.0]]
    told = Ends(torch.tensor([8, 9]), None)
    assert replace(committed, known_ends=told).cut().ends is told


def test_a_head_without_a_drafter_is_named(target) -> None:
    class Stray(HeadByDepth):
        """A head that nothing was registered for."""

        def __init__(self) -> None: ...

    Stray.__abstractmethods__ = frozenset()
    with pytest.raises(TypeError, match="no drafter is registered for Stray"):
        drafter_for(Stray(), target)


def test_a_second_drafter_of_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="MedusaHeads already has a drafter: .*MedusaDrafter"):
        register_head_drafter(MedusaHeads)(object)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "verifier": "rejection"}])
def test_a_vocabulary_smaller_than_the_usual_trees_are_wide(make_target, family, options) -> None:
    """The trees that Medusa publishes have the tenth guess at the root."""
    target = make_target(vocab=5, layers=1)
    head = HEADS[family](HEADS[family].sized(HEADS[family].config_class(), target))
    head.initialize(target)
    decoder = Decoder(target, drafter_for(head.eval(), target))
    assert len(decoder.generate([[1, 2]], max_new_tokens=4, **options).sequences[0]) == 4
    if not options:
        with pytest.raises(UserError, match="6 children of a node .* has 5 guesses"):
            drafter_for(head, target, TreeShape.from_paths([(n,) for n in range(6)]))


ODD = (
    "beam", "falcon:alibi", "gemma3n_text", "gemma4_unified_text", "gpt_neo", "llama4_text",
    "longcat_flash",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [*ODD, *(more(each) for each in ARCHITECTURES | OTHERS if each not in ODD)]
)
def test_a_head_of_every_family_fits_every_target_or_is_refused_in_a_sentence(name: str) -> None:
    """Where layers differ in size, have no rotation or no `sdpa` attention, too."""
    target = Target(tiny_model(name, (ARCHITECTURES | OTHERS)[name]))
    refused = set()
    for family in sorted(HEADS):
        try:
            decoder = Decoder(target, drafter_for(make_head(family, target), target))
            assert decoder.generate([9, 10], max_new_tokens=4).sequences
        except UserError as error:
            refused.add(family)
            assert "MTP layer" in str(error) or "streams" in str(error)
    assert refused <= ({*HEADS} if name in ("gemma3n_text", "hy_v4") else {"mtp"})
