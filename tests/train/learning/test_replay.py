"""Decoding that is played again from ranks: where steps begin, and the tau that follows."""

from types import SimpleNamespace

import pytest
import torch

from drafthead.core.trees.tree import TreeShape
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.infer import Decoder
from drafthead.train.data.packing import PackedData, collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.features.reading import read_features
from drafthead.train.learning.evaluation import by_length, measure, ranked_anchors
from drafthead.train.learning.ranks import Ranked, RankedAnchors, accepted_in, roots_of_steps


def test_a_tree_accepts_the_true_path_as_far_as_it_holds_it() -> None:
    tree = {(), (0,), (1,), (0, 0), (0, 1)}
    assert accepted_in(tree, (0, 1, 0)) == 2
    assert accepted_in(tree, (1, 0)) == 1, "a rank counts behind its own parents alone"
    assert accepted_in(tree, (2, 0)) == 0
    assert accepted_in({()}, (0, 0)) == 0


def test_a_step_begins_behind_what_the_step_before_accepted_and_the_token_it_missed() -> None:
    one = [(0, 1)] * 5
    assert roots_of_steps(one, [3, 4, 5, 6, 7], [2, 0, 0, 0, 0]) == [0, 3, 4]
    assert roots_of_steps(one, [3, 4, 5, 6, 7], [4, 9, 9, 9, 9]) == [0]
    # The next conversation begins afresh, wherever the step before would have led; places that are
    # not supervised are skipped.
    two = [(0, 1), (0, 1), (0, 2), (0, 2), (1, 1)]
    assert roots_of_steps(two, [1, 2, 5, 8, 1], [3, 0, 1, 0, 0]) == [0, 2, 3, 4]


def test_tau_by_length_counts_a_steps_tokens_where_it_begins() -> None:
    """Two conversations in a row, the second with 2,010 tokens before its two answers."""
    known, missed = [0, 0], [9, 9]
    first = [(10 + n, missed) for n in range(5)]  # after 11 to 15 tokens of its own 20
    late = [(20 + 2009 + n, known) for n in range(111)]  # after 2,010 to 2,120
    again = [(20 + 2300 + n, missed) for n in range(3)]
    places = [(anchor, ranks) for part in (first, late, again) for anchor, ranks in part]
    keys = [(0, 1)] * 5 + [(0, 2)] * 114
    ranks = torch.tensor([ranks for _, ranks in places])
    table = SimpleNamespace(lengths=[2400, 20])
    found = RankedAnchors(ranks, keys, [anchor for anchor, _ in places])
    rows = by_length(Ranked(found, PackedData(table, ((1, 0),))))
    tokens = {name: row["tokens"] for name, row in rows.items()}
    assert tokens == {
        "before: from 0": 5, "before: from 2,000": 114,
        "in the answer: from 0": 108, "in the answer: from 100": 11,
    }  # fmt: skip
    assert rows["before: from 0"]["chain"] == 1
    # Steps of 3 tokens: 110 in 37 passes, of which the third answer's 2 in 2.
    assert rows["before: from 2,000"]["chain"] == 112 / 39
    assert rows["in the answer: from 0"]["chain"] == (4 + 34 * 3 + 2) / (4 + 34 + 2)
    assert rows["in the answer: from 100"]["chain"] == 8 / 3


def test_replayed_roots_are_those_of_decoding(target, make_head) -> None:
    """Answers of the target itself: the roots are where the steps of the engine began."""
    head = make_head("medusa", target, num_heads=3)
    head.path_counts = {(): 9, (0,): 3}
    prompts = [[9, 10, 11, 12], [20, 21, 22, 23]]
    shape = TreeShape.from_paths([(0,), (1,), (2,), (0, 0)])
    decoder = Decoder(target, drafter_for(head, target, shape))
    decoder.end_ids = frozenset()
    result = decoder.generate(prompts, max_new_tokens=30)
    ids = torch.tensor([p + s for p, s in zip(prompts, result.sequences, strict=True)])
    features = target.run(ids, torch.arange(34).expand(2, 34), None, head.features_needed).features
    supervised = torch.zeros_like(ids, dtype=torch.bool)
    supervised[:, 4:] = True
    batch = HeadBatch(ids, torch.ones_like(ids), supervised, features)
    ranks = head.loss(batch, target).ranks
    rows, anchors = anchor_positions(batch)
    tree = {(), *shape.paths}
    accepted = [accepted_in(tree, tuple(row)) for row in ranks.tolist()]
    keys = [(int(row), 1) for row in rows]
    chosen = roots_of_steps(keys, anchors.tolist(), accepted)
    replayed_run = ranked_anchors(batch, ranks)
    assert replayed_run.tau(tree) == pytest.approx(result.stats.tau)
    for row, lengths in enumerate(result.stats.accept_lengths):
        begins = 4 + torch.tensor([0, *lengths[:-1]]).cumsum(0)
        replayed_places = [int(anchors[n]) + 1 for n in chosen if int(rows[n]) == row]
        # The last step's draft goes beyond the answer's limit, where there are no ranks.
        assert replayed_places[: len(begins)] == begins.tolist()
        assert max(lengths) > 1, "something was accepted"


def test_the_tau_that_is_reported_is_the_tau_of_decoding(family: str, target, make_head) -> None:
    """Answers that end where they end, several to a row, drafted as chains by every family."""
    head = make_head(family, target)
    depth = head.depth
    prompts = [[9, 10, 11], [20, 21], [30, 31, 32, 33], [8], [40, 41, 42], [50, 51]]
    decoder = Decoder(target, drafter_for(head, target, TreeShape.chain(depth)))
    result = decoder.generate(prompts, max_new_tokens=60)
    sequences = [
        TokenSequence(
            torch.tensor(p + s, dtype=torch.int32), torch.arange(len(p) + len(s)) >= len(p)
        )
        for p, s in zip(prompts, result.sequences, strict=True)
    ]
    tokens = collate([sequences[:2], sequences[2:3], sequences[3:]])
    batch = read_features(target, tokens, head.features_needed, "no")
    evaluation = measure(ranked_anchors(batch, head.loss(batch, target).ranks))
    assert evaluation.tau_chain == pytest.approx(result.stats.tau)
    assert evaluation.anchors == sum(map(len, result.sequences))
