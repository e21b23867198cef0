"""Which tokens anchors guess, and at which depth."""

import torch

from drafthead.core.target.features import Features
from drafthead.heads.families.by_depth import guessed_tokens
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.objectives.batch import HeadBatch


def test_each_token_knows_the_anchors_that_guess_it() -> None:
    """Row 0: p r A B C D with all but p supervised; row 1: two segments of q r A."""
    segments = torch.tensor([[1] * 6, [1] * 3 + [2] * 3])
    supervised = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]]).bool()
    batch = HeadBatch(torch.zeros(2, 6, dtype=torch.long), segments, supervised, Features(None))
    rows, anchors = anchor_positions(batch)
    assert rows.tolist() == [0] * 5 + [1] * 4
    guessed = guessed_tokens(batch, rows, anchors, depth=2)
    assert guessed.places.tolist() == [1, 2, 3, 4, 6 + 1, 6 + 4]
    assert guessed.anchors.tolist() == [[0, -1], [1, 0], [2, 1], [3, 2], [5, -1], [7, -1]]
