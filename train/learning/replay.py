"""The second, on-policy stage of training: only at positions where decoding would draft.

On an answer that the target wrote, lossless decoding reproduces the answer. From a root it accepts
the prefix that the head's tree contains; the target adds the token that the head missed, and that
token is the next root. The ranks of the true tokens give the length of each step, so one pass over
packed rows replays the whole decoding. On other texts this is decoding under the `match` rule with
a target that would write them. (Draft-OPD, arXiv 2605.29343, trains from such rejections, replayed
from rollouts.)
"""

from dataclasses import replace

import torch

from drafthead.heads.base import HeadBatch
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.trees.static import grow_tree
from drafthead.train.learning.ranks import accepted_in, count_paths, roots_of_steps

REPLAY_NODES = 16  # of the tree that is drafted after each root, the root included


def replayed(batch: HeadBatch, ranks: torch.Tensor) -> HeadBatch:
    """The batch with `roots` where decoding drafts: at each token that the head missed.

    `ranks` [A, K] are the head's ranks of the true tokens after all A anchors, row by row. The tree
    is the best of `REPLAY_NODES` nodes for these ranks.
    """
    ranks = ranks.cpu()
    counts = count_paths(ranks)
    tree = {(), *grow_tree(counts, REPLAY_NODES).paths}
    rows, anchors = anchor_positions(batch)
    conversations = batch.segments[rows, anchors].tolist()
    keys = list(zip(rows.tolist(), conversations, strict=True))
    accepted = [accepted_in(tree, tuple(row)) for row in ranks.tolist()]
    chosen = torch.tensor(roots_of_steps(keys, anchors.tolist(), accepted), dtype=torch.long)
    chosen = chosen.to(rows.device)
    roots = torch.zeros_like(batch.supervised)
    roots[rows[chosen], anchors[chosen] + 1] = True
    return replace(batch, roots=roots)
