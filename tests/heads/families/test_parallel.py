"""Block-parallel heads: what blocks see, how trees are scored, what the loss teaches."""

import heapq
from dataclasses import replace

import pytest
import torch
from tiny import BUSHY, HIDDEN, VOCAB
from torch.nn.functional import softplus

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.families.parallel.candidates import (
    CANDIDATES,
    DraftedBlock,
    Scorer,
    best_first_growth,
    num_candidates,
)
from drafthead.heads.families.parallel.drafter import ParallelSession, Reach
from drafthead.heads.families.parallel.head import ParallelConfig, ParallelHead
from drafthead.heads.families.parallel.transformer import spread_taps
from drafthead.heads.growing.dynamic import Growth, Operations, best_tree, with_children
from drafthead.heads.layers.segments import positions_in_segments, segment_mask
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch
from drafthead.heads.objectives.losses import overlap
from drafthead.infer import Decoder
from drafthead.lab.exactness.oracle import OracleDecoder

GREEDY = SamplingConfig()
KINDS = ["none", "markov", "gated", "recurrent"]
# The published heads as configurations.
PUBLISHED = {
    "DFlash": {"causal": False, "root_predicts": False, "correction": "none", "tap_norm": False},
    "JetSpec": {"causal": True, "root_predicts": False, "correction": "none"},
    "DSpark": {"causal": False, "correction": "markov", "confidence_weight": 1.0},
    "Domino": {"causal": False, "root_predicts": False, "correction": "recurrent"},
    "sliding": {"causal": True, "root_predicts": False, "correction": "none", "window": 7},
}


def batch_of(target: Target, segments: list[list[int]], seed: int = 0) -> HeadBatch:
    """Random tokens with the target's features; the first two of each segment are the prompt."""
    numbers = torch.tensor(segments)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCAB, numbers.shape, generator=generator)
    positions = positions_in_segments(numbers)
    spec = FeatureSpec(layers=(0, 1), last=True)
    output = target.run(ids, positions, segment_mask(numbers, torch.float32), spec)
    return HeadBatch(ids, numbers, (positions >= 2) & (numbers > 0), output.features)


ROWS = [[1] * 9 + [2] * 8 + [0] * 3, [1] * 20]


def session_after(head: ParallelHead, target: Target, batch: HeadBatch, row: int, anchor: int):
    """A session that has read the segment of an anchor up to it."""
    here = (batch.segments[row] == batch.segments[row, anchor]).nonzero()[:, 0]
    places = here[here <= anchor]
    session = drafter_for(head, target).start(batch.input_ids[:1], torch.ones(1))
    features = batch.features.map(lambda hidden: hidden[row, places][None])
    tokens = batch.input_ids[row, places + 1][None]
    session.commit(Committed(tokens, features, torch.tensor([len(places)])))
    assert isinstance(session, ParallelSession)
    return session


# Blocks and their context


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "root_predicts": True, "root_feature": True},
        {"causal": True, "root_predicts": False, "mask_token": 3},
        {"causal": False, "root_predicts": True, "tap_norm": False},
        {"causal": False, "root_predicts": False, "num_layers": 1},
        {"causal": False, "root_predicts": True, "window": 7},
        {"causal": True, "root_predicts": True, "window": 6},
    ],
    ids=str,
)
def test_blocks_drafted_together_equal_each_alone_and_the_sessions(
    target, make_head, options
) -> None:
    head = make_head("parallel", target, **options)
    batch = batch_of(target, ROWS)
    anchors = torch.tensor([[1, 4, 9, 12], [3, 4, 5, 17]])
    together = head.block_states(batch, target, anchors)
    assert together.shape == (2, 4, 6 if options["root_predicts"] else 5, HIDDEN)
    for place in range(4):
        alone = head.block_states(batch, target, anchors[:, [place]])
        torch.testing.assert_close(together[:, place], alone[:, 0], atol=1e-5, rtol=1e-5)
        for row in range(2):
            session = session_after(head, target, batch, row, int(anchors[row, place]))
            drafted = session.block_states()[0]
            torch.testing.assert_close(together[row, place], drafted, atol=1e-4, rtol=1e-4)


def test_more_blocks_than_attend_at_once_change_nothing(target, make_head, monkeypatch) -> None:
    head, batch = make_head("parallel", target), batch_of(target, ROWS)
    anchors = torch.arange(7).expand(2, 7)
    together = head.block_states(batch, target, anchors)
    monkeypatch.setattr("drafthead.heads.families.parallel.head.BLOCKS_AT_ONCE", 2)
    torch.testing.assert_close(head.block_states(batch, target, anchors), together)


def test_a_block_sees_its_context_and_itself(target, make_head) -> None:
    """Anchors 1 and 3 of a row whose second conversation begins at 2."""
    segments, anchors = torch.tensor([[1, 1, 2, 2, 2]]), torch.tensor([[1, 3]])
    expected = {
        True: ["11... 1. ..", "11... 11 ..", "..11. .. 1.", "..11. .. 11"],
        False: ["11... 11 ..", "11... 11 ..", "..11. .. 11", "..11. .. 11"],
    }
    for causal, rows in expected.items():
        head = make_head("parallel", target, block_size=2, causal=causal)
        mask = head.training_mask(segments, anchors)[0, 0].int().tolist()
        assert mask == [[int(c == "1") for c in row.replace(" ", "")] for row in rows]


def test_a_slot_sees_the_positions_of_its_window(target, make_head) -> None:
    """Anchor 3, so that the block of two begins at 4; by a window of 3, its own position counts."""
    segments, anchors = torch.tensor([[1, 1, 1, 1, 1]]), torch.tensor([[3]])
    head = make_head("parallel", target, block_size=2, causal=False, window=3)
    mask = head.training_mask(segments, anchors)[0, 0].int().tolist()
    assert mask == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1]]


@pytest.mark.parametrize("window", [0, 6])
def test_a_context_read_in_pieces_equals_one_read_at_once(target, make_head, window) -> None:
    """Two rows that take in different numbers of positions, the second of them padded."""
    head = make_head("parallel", target, window=window)
    batch = batch_of(target, [[1] * 12, [1] * 12])
    session = drafter_for(head, target).start(batch.input_ids, torch.tensor([3, 2]))
    done = torch.tensor([0, 0])
    for counts in ([3, 2], [1, 3], [4, 1], [2, 2]):
        places = (done[:, None] + torch.arange(max(counts))).clamp_max(10)
        rows = torch.arange(2)[:, None]
        features = batch.features.map(lambda hidden, r=rows, p=places: hidden[r, p])
        tokens = batch.input_ids[rows, places + 1]
        session.commit(Committed(tokens, features, torch.tensor(counts)))
        session.propose(Budget(8, 3), GREEDY, None)  # leaves no trace
        done += torch.tensor(counts)
        for row, count in enumerate(done.tolist()):
            expected = session_after(head, target, batch, row, count - 1).block_states()
            torch.testing.assert_close(
                session.block_states()[row], expected[0], atol=1e-5, rtol=1e-5
            )
    session.keep_rows(torch.tensor([1]))
    expected = session_after(head, target, batch, 1, int(done[1]) - 1).block_states()
    torch.testing.assert_close(session.block_states(), expected, atol=1e-5, rtol=1e-5)


# Corrections


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_fresh_correction_changes_nothing(target, kind) -> None:
    batch, results = batch_of(target, ROWS), []
    for correction in ("none", kind):
        torch.manual_seed(0)
        head = ParallelHead(ParallelHead.sized(ParallelConfig(correction=correction), target))
        head.initialize(target)
        results.append(head.eval().loss(batch, target))
    assert torch.equal(results[0].total, results[1].total)
    assert torch.equal(results[0].ranks, results[1].ranks)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_codes_of_a_block_are_those_of_its_steps(target, make_head, kind) -> None:
    correction = make_head("parallel", target, correction=kind).correction
    hidden, before = torch.randn(2, 4, HIDDEN), torch.randint(0, VOCAB, (2, 4))
    codes, state = correction.codes(before, hidden), correction.begin(hidden[:, 0])
    for slot in range(4):
        code, state = correction.advance(before[:, slot], hidden[:, slot], state)
        torch.testing.assert_close(codes[:, slot], code)
    # Only a recurrent correction knows more than the token before the slot.
    before[:, 0] = (before[:, 0] + 1) % VOCAB
    changed = (correction.codes(before, hidden) != codes).any(-1).any(0).tolist()
    assert changed == [True, *[kind == "recurrent"] * 3]


def test_tokens_that_are_alike_for_the_target_begin_with_codes_that_are_alike(target) -> None:
    head = ParallelHead(ParallelHead.sized(ParallelConfig(correction_rank=HIDDEN), target))
    head.initialize(target)
    embeddings = target.embed(torch.arange(VOCAB))
    wanted, got = (torch.cdist(x, x) for x in (embeddings, head.correction.embed.weight))
    torch.testing.assert_close(got / got.max(), wanted / wanted.max(), atol=1e-3, rtol=0)


# Trees


class TiedScorer:
    """Log-probabilities of few values, so that many paths are equally probable."""

    def __init__(self, batch: int, depths: int, width: int):
        generator = torch.Generator().manual_seed(1)
        shape = (batch, depths, VOCAB, width)
        self.table = -torch.randint(1, 4, shape, generator=generator).float()
        self.candidates = torch.stack(
            [torch.randperm(VOCAB, generator=generator)[:width] for _ in range(batch * depths)]
        ).view(batch, depths, width)

    def begin(self) -> torch.Tensor:
        return torch.zeros(len(self.table), 1, 0)

    def log_probs(self, depth, parents, state) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(parents))[:, None]
        return self.table[rows, depth, parents], state


def block_of(target: Target, make_head, kind: str) -> tuple[ParallelHead, DraftedBlock]:
    head = make_head("parallel", target, correction=kind, seed=3)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 4, HIDDEN, generator=generator)
    return head, DraftedBlock(head, hidden, target.project(hidden))


ROOTS = torch.tensor([9, 10])


def behind_path(scorer, row: int, path: list[int]) -> list[float]:
    """Log-probabilities of the candidates behind one path, its root included, from scratch."""
    state = scorer.begin()
    for depth, token in enumerate(path):
        parents = torch.full((len(scorer.candidates), 1), token)
        log_probs, state = scorer.log_probs(depth, parents, state)
    return log_probs[row, 0].tolist()


def heap_tree(scorer, row: int, root: int, budget: Budget) -> list[tuple[int, ...]]:
    """The paths of the best-first tree of one row, by popping a heap, in no order."""
    # Equals: the shallower, then the one under the better parent, then the earlier candidate.
    heap = [(0.0, 0, (), (root,))]
    kept = []
    while heap and len(kept) < budget.nodes:
        cost, depth, order, path = heapq.heappop(heap)
        kept.append(path)
        if depth < min(budget.depth, scorer.candidates.shape[1]):
            for rank, log_prob in enumerate(behind_path(scorer, row, list(path))):
                token = int(scorer.candidates[row, depth, rank])
                heapq.heappush(
                    heap, (cost - log_prob, depth + 1, ((cost, order), rank), (*path, token))
                )
    return kept


def paths_of(tree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def exact(budget: Budget) -> Reach:
    """Levels and frontier without a spare node."""
    return Reach(min(budget.depth, 4, budget.nodes - 1), max(1, budget.nodes - 2))


def grown(roots: torch.Tensor, scorer, growing: Reach, nodes: int) -> TokenTree:
    width = scorer.candidates.shape[-1]
    slots = torch.arange(min(nodes, num_candidates(width, *growing)))
    tables = best_tree(best_first_growth(roots, scorer, *growing), slots, growing.levels)
    return tables.tree(growing.levels, width)


@pytest.mark.parametrize("budget", [Budget(2, 1), Budget(9, 4), Budget(24, 4), Budget(40, 2)])
@pytest.mark.parametrize("kind", [*KINDS, "ties"])
def test_the_tree_holds_what_a_heap_would_pop(target, make_head, kind, budget) -> None:
    if kind == "ties":
        scorer = TiedScorer(2, 4, 5)
    else:
        scorer = Scorer.of(block_of(target, make_head, kind)[1], ROOTS)
    tree = grown(ROOTS, scorer, exact(budget), budget.nodes)
    for row, root in enumerate(ROOTS.tolist()):
        paths = paths_of(tree, row)
        assert sorted(paths) == sorted(heap_tree(scorer, row, root, budget))
        assert [len(path) - 1 for path in paths] == tree.depths[row].tolist()
        assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_scored_by_the_whole_path_before_them(target, make_head, kind) -> None:
    """The log-probabilities are the corrected logits of the true path, on the candidates."""
    head, block = block_of(target, make_head, kind)
    scorer = Scorer.of(block, ROOTS)
    path = torch.tensor([[9, 20, 21, 22], [10, 30, 31, 32]])
    logits = target.project(block.hidden)
    if head.correction is not None:
        logits = logits + head.correction.output(head.correction.codes(path, block.hidden))
    for row in range(2):
        for depth in range(4):
            wanted = logits[row, depth, scorer.candidates[row, depth]].log_softmax(-1)
            found = torch.tensor(behind_path(scorer, row, path[row, : depth + 1].tolist()))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_candidates_know_which_tokens_they_follow(target, make_head) -> None:
    """Behind a certain token all candidates are those that its correction favours."""
    head, block = block_of(target, make_head, "markov")
    block.logits = block.logits.clone()
    block.logits[:, 0, 40] = 1000.0  # certainly the first token
    logits = block.logits[:, 1] + head.correction.output(head.correction.embed(torch.tensor([40])))
    wanted = logits.topk(CANDIDATES).indices.sort().values
    found = Scorer.of(block, ROOTS).candidates[:, 1].sort().values
    assert torch.equal(found, wanted)
    assert not torch.equal(found, block.logits[:, 1].topk(CANDIDATES).indices.sort().values)


@pytest.mark.parametrize("nodes", [2, 3, 8, 24])
@pytest.mark.parametrize("kind", [*KINDS, "ties"])
def test_candidates_that_find_no_room_change_nothing(target, make_head, kind, nodes) -> None:
    """So one compiled growth serves trees of many sizes."""
    if kind == "ties":
        scorer = TiedScorer(2, 4, 5)
    else:
        scorer = Scorer.of(block_of(target, make_head, kind)[1], ROOTS)
    needed = exact(Budget(nodes, min(4, nodes - 1)))
    trees = [
        best_first_growth(ROOTS, scorer, *growing).best(torch.arange(nodes))
        for growing in (needed, Reach(4, needed.frontier + 9))
    ]
    (*tables, scores), (*others, other_scores) = trees
    assert all(map(torch.equal, tables, others))
    torch.testing.assert_close(scores, other_scores)


def test_every_level_grows_by_the_backends_operations(target, make_head) -> None:
    session = session_after(make_head("parallel", target), target, batch_of(target, ROWS), 1, 4)
    widths: list[int] = []

    def noted(growth, opened, log_probs, tokens) -> Growth:
        widths.append(opened.shape[1])
        return with_children(growth, opened, log_probs, tokens)

    session.drafter.operations = Operations(with_children=noted)
    assert session.propose(Budget(9, 3), GREEDY, None).max_depth <= 3
    assert widths == [1, 7, 7]


def test_which_nodes_see_which_is_not_kept_where_no_pass_follows() -> None:
    assert best_first_growth(ROOTS, TiedScorer(2, 4, 5), Reach(4, 9).levels, 9).visible is None


def test_a_tree_that_the_candidates_cannot_fill_stays_smaller() -> None:
    tree = grown(torch.tensor([9]), TiedScorer(1, 2, 2), Reach(2, 62), 64)
    assert tree.tokens.shape == (1, 1 + 2 + 4)
    assert (tree.max_depth, tree.width) == (2, 2)
    assert num_candidates(width=2, levels=2, frontier=62) == 1 + 2 + 4
    assert num_candidates(width=16, levels=3, frontier=6) == 1 + 16 + 6 * 16 + 6 * 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_fixed_tree_scores_children_by_their_real_path(target, make_head, kind, drawn) -> None:
    head = make_head("parallel", target, correction=kind)
    batch = batch_of(target, ROWS)
    session = session_after(head, target, batch, 1, 7)
    session.drafter = drafter_for(head, target, BUSHY)
    random = RowRandom([1], torch.device("cpu")) if drawn else None
    if random is not None:
        random.begin_step([0])
    tree = session.propose(BUSHY.budget, SamplingConfig(temperature=0.7), random)
    assert torch.equal(tree.parents[0], BUSHY.parents)
    paths, hidden = paths_of(tree, 0), session.block_states()[0]
    for node in set(BUSHY.parents[1:].tolist()):
        path = torch.tensor(paths[node])
        logits = target.project(hidden[len(path) - 1])
        if head.correction is not None:
            logits += head.correction.output(head.correction.codes(path, hidden[: len(path)]))[-1]
        children = (BUSHY.parents == node).nonzero()[:, 0]
        tokens = tree.tokens[0, children]
        if drawn:
            ids = tree.draft_ids[0, node]
            probs = (logits / 0.7).softmax(-1)[ids]
            found = tree.draft_probs[0, node].float()
            torch.testing.assert_close(found, probs, atol=1e-5, rtol=1e-4)
            assert len(set(tokens.tolist()) & set(ids.tolist())) == len(children)
        else:
            assert torch.equal(tokens, logits.topk(len(children)).indices)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_heads_are_configurations(target, make_head, name) -> None:
    head = make_head("parallel", target, **PUBLISHED[name])
    prompts = [[9, 10, 11], [12], [13, 14]]
    expected = OracleDecoder(target).generate(prompts, max_new_tokens=24).sequences
    decoder = Decoder(target, drafter_for(head, target))
    assert decoder.generate(prompts, max_new_tokens=24).sequences == expected


# The loss


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_of_drafting_behind_the_true_tokens(target, make_head, kind) -> None:
    head, batch = make_head("parallel", target, correction=kind), batch_of(target, ROWS)
    blocks, ranks = head.choose_blocks(batch), head.loss(batch, target).ranks
    rows, _ = blocks.valid.nonzero(as_tuple=True)
    for index, (row, anchor) in enumerate(
        zip(rows.tolist(), blocks.anchors[blocks.valid].tolist(), strict=True)
    ):
        hidden = session_after(head, target, batch, row, anchor).block_states()[0]
        logits = target.project(hidden)
        segment = batch.segments[row]
        end = int((segment == segment[anchor]).nonzero().max())
        if head.correction is not None:
            before = batch.input_ids[row, anchor + 1 : anchor + 1 + head.depth]
            known = len(before)
            logits[:known] += head.correction.output(head.correction.codes(before, hidden[:known]))
        for k in range(head.depth):
            place = anchor + 2 + k
            if place > end:
                assert ranks[index, k] == MAX_RANK
            else:
                better = logits[k] > logits[k, batch.input_ids[row, place]]
                assert ranks[index, k] == min(MAX_RANK, int(better.sum()))


def test_measuring_drafts_from_all_anchors_and_training_from_some(target, make_head) -> None:
    """Row 0 has 8 + 7 - 2 roots (positions 2 to 8 and 11 to 16), row 1 has 18."""
    batch = batch_of(target, ROWS)
    head = make_head("parallel", target, anchors=4)
    blocks = head.choose_blocks(batch)
    found = [blocks.anchors[row][blocks.valid[row]].sort().values.tolist() for row in range(2)]
    assert found == [[*range(1, 8), *range(10, 16)], list(range(1, 19))]
    head.train()
    torch.manual_seed(0)
    some = head.choose_blocks(batch)
    assert some.anchors.shape == (2, 4) and some.valid.all()
    assert some.weights.tolist() == [13 / 4, 18 / 4]
    chosen = [set(row) for row in some.anchors.tolist()]
    assert all(len(c) == 4 and c <= set(f) for c, f in zip(chosen, found, strict=True))
    assert not torch.equal(head.choose_blocks(batch).anchors, some.anchors)
    fixed = make_head("parallel", target, anchor_places="blocks").train().choose_blocks(batch)
    assert fixed.anchors[1][fixed.valid[1]].sort().values.tolist() == [6, 12, 18]


def test_some_anchors_stand_for_all_of_their_row(target, make_head) -> None:
    batch = batch_of(target, ROWS)
    head = make_head("parallel", target, anchors=3, loss="soft")
    everything = head.loss(batch, target).total
    head.train()
    torch.manual_seed(0)
    estimates = torch.stack([head.loss(batch, target).total for _ in range(60)])
    error = estimates.std() / 60**0.5
    assert abs(estimates.mean() - everything) < 4 * error
    assert error < 0.05 * everything


def test_dpace_weighs_a_place_by_the_drafts_own_confidence(target, make_head) -> None:
    """A single label: its weight is (1 + probability of the true token) / 2."""
    batch = batch_of(target, [[1] * 5])
    batch.supervised[:, :3] = False
    head = make_head("parallel", target, dpace=True, depth_decay=1.0, loss="hard")
    loss = head.loss(batch, target)
    assert loss.depth_counts.tolist() == [1, 0, 0, 0, 0, 0]
    only = loss.depth_losses[0]
    torch.testing.assert_close(loss.total, (1 + torch.exp(-only)) / 2 * only)


def test_nothing_supervised_is_no_loss(target, make_head) -> None:
    head, batch = make_head("parallel", target), batch_of(target, ROWS)
    loss = head.loss(replace(batch, supervised=torch.zeros_like(batch.supervised)), target)
    assert loss.total == 0
    assert loss.ranks.shape == (0, head.depth)


@pytest.mark.parametrize("bias", [-1.0, 2.0])
def test_the_confidence_output_learns_the_overlap(target, make_head, bias) -> None:
    """Always saying the logit b costs softplus(b) - b x overlap at each place."""
    options = {"correction": "none", "depth_decay": 1.0, "confidence_weight": 1.0}
    head, batch = make_head("parallel", target, **options), batch_of(target, [[1] * 9])
    head.confidence.weight.data.zero_()
    head.confidence.bias.data.fill_(bias)
    expected = 0.0
    for anchor in range(1, 8):
        hidden = session_after(head, target, batch, 0, anchor).block_states()[0]
        places = torch.arange(anchor + 1, min(8, anchor + 1 + head.depth))
        teacher = batch.features.last[0, places]
        shared = overlap(target.project(hidden[: len(places)]), target.project(teacher))
        expected += float((softplus(torch.tensor(bias)) - bias * shared).sum())
    loss = head.loss(batch, target)
    torch.testing.assert_close(loss.total - loss.depth_losses.sum(), torch.tensor(expected))


# Draft vocabulary


def test_a_draft_vocabulary_holds_the_most_frequent_tokens(target) -> None:
    counts = torch.zeros(VOCAB, dtype=torch.long)
    counts[[5, 20, 40]] = torch.tensor([3, 9, 1])
    head = ParallelHead(ParallelHead.sized(ParallelConfig(draft_vocab_size=3), target)).eval()
    head.prepare(counts)
    head.initialize(target)
    assert head.draft_ids.tolist() == [5, 20, 40]
    hidden = torch.randn(2, HIDDEN)
    wanted = target.project(hidden)[:, [5, 20, 40]]
    torch.testing.assert_close(head.base_logits(hidden, target), wanted)
    batch = batch_of(target, ROWS)
    ranks = head.loss(batch, target).ranks
    assert (ranks < 3).sum() == (ranks < MAX_RANK).sum() > 0
    session = session_after(head, target, batch, 0, 5)
    tree = session.propose(Budget(16, 3), GREEDY, None)
    assert set(tree.tokens[0, 1:].tolist()) <= {5, 20, 40}


def test_a_draft_vocabulary_of_all_tokens_changes_nothing(target, make_head) -> None:
    batch = batch_of(target, ROWS)
    whole = make_head("parallel", target, loss="soft", correction="none")
    drafted = ParallelHead(replace(whole.config, draft_vocab_size=VOCAB)).eval()
    drafted.initialize(target)
    drafted.load_state_dict(whole.state_dict(), strict=False)
    drafted.requires_grad_(False)
    first, second = whole.loss(batch, target), drafted.loss(batch, target)
    torch.testing.assert_close(first.total, second.total)
    assert torch.equal(first.ranks, second.ranks)


# Refusals


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"block_size": 0}, "leave nothing to draft"),
        ({"block_size": 1, "root_predicts": False}, "leave nothing to draft"),
        ({"num_layers": 0}, "leave nothing to draft"),
        ({"taps": [1, 1]}, r"different layers.*\[1, 1\]"),
        ({"taps": [-2]}, r"from -1 on"),
        ({"mask_token": -1}, "mask_token"),
        ({"block_size": 6, "window": 5}, "window must be 0 or hold a block of 6, got 5"),
        ({"window": -1}, "window must be 0"),
        ({"correction_rank": -1}, "got -1"),
        ({"correction_rank": 64, "hidden_size": 32}, "correction_rank .*64"),
        ({"draft_vocab_size": 70, "vocab_size": 64}, "draft_vocab_size .*70"),
        ({"depth_decay": 0}, "depth_decay"),
        ({"anchors": 0}, "anchors"),
        ({"confidence_weight": -1}, "confidence_weight"),
    ],
)
def test_a_config_that_cannot_work_is_refused(options, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        ParallelConfig(**options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"taps": (0, 3)}, r"head.taps is \[0, 3\], but the target has layers 0 to 1"),
        ({"mask_token": 64}, "head.mask_token is 64, but the target has 64 tokens"),
        ({"correction_rank": 33}, "head: correction_rank .*33"),
        ({"draft_vocab_size": 65}, "head: draft_vocab_size .*65"),
        ({"hidden_size": 16}, "head.hidden_size is 16, but the target's is 32"),
    ],
)
def test_a_config_that_does_not_fit_the_target_is_refused(target, options, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        ParallelHead.sized(ParallelConfig(**options), target)


def test_a_tree_deeper_than_the_block_is_refused(target, make_head) -> None:
    with pytest.raises(UserError, match="depth 3 does not fit a parallel head that drafts 2"):
        drafter_for(make_head("parallel", target, block_size=2), target, BUSHY)


def test_taps_are_spread_up_to_the_last_layer() -> None:
    assert spread_taps(14) == (3, 6, 9, 13)
    assert spread_taps(36) == (8, 17, 26, 35)
    assert spread_taps(2) == (0, 1)
    assert spread_taps(1) == (0,)
