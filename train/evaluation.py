"""How well a head drafts on held-out conversations, from the ranks of the true tokens alone.

A rank is the place of the true token among the head's guesses at a depth. Since greedy decoding
accepts the true token, the ranks decide what every static tree would have accepted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from drafthead.heads.base import MAX_RANK, DraftHead
from drafthead.heads.target.target import Target
from drafthead.heads.trees.static import grow_tree
from drafthead.heads.trees.tree import Path
from drafthead.train.features import read_features
from drafthead.train.packing import PackedData

KEPT_PATHS = 512
TREE_SIZES = (8, 16, 32, 64)  # nodes, the root included


@dataclass(frozen=True)
class Evaluation:
    """Accuracy of a head. `tau` counts tokens per target pass, the bonus token included."""

    anchors: int  # positions from which the head drafted
    top1: tuple[float, ...]  # share of anchors whose depth-k token was the first guess
    alpha: tuple[float, ...]  # the same, among the anchors whose earlier guesses were all right
    tau_chain: float
    tau_tree: dict[int, float]  # nodes -> tau of the best static tree of that size
    path_counts: dict[Path, int]  # see heads.tree.grow_tree

    def summary(self) -> dict[str, Any]:
        """Everything but the path counts, ready for JSON."""
        values = asdict(self)
        del values["path_counts"]
        return values


def chain_lengths(ranks: torch.Tensor) -> torch.Tensor:
    """How many first guesses are right in a row, [A], from ranks [A, K].

    Ranks 0 0 3 0 make a chain of 2.
    """
    return (ranks == 0).long().cumprod(dim=1).sum(dim=1)


def count_paths(ranks: torch.Tensor, keep: int = KEPT_PATHS) -> dict[Path, int]:
    """How often each path of guesses was the true continuation, from ranks [A, K].

    Ranks 0 2 MAX_RANK count the paths (), (0,) and (0, 2). The `keep` most frequent are returned;
    a path is never more frequent than its beginning, so they form a tree.
    """
    counts: Counter[Path] = Counter({(): ranks.shape[0]})
    for depth in range(1, ranks.shape[1] + 1):
        inside = ranks[(ranks[:, :depth] < MAX_RANK).all(dim=1), :depth]
        paths, times = inside.unique(dim=0, return_counts=True)
        counts.update(dict(zip(map(tuple, paths.tolist()), times.tolist(), strict=True)))
    ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return {path: counts[path] for path in ordered[:keep]}


def expected_tau(path_counts: dict[Path, int], num_nodes: int, anchors: int) -> float:
    """Tokens per pass of the best static tree of `num_nodes` nodes: 1 + accepted per anchor."""
    shape = grow_tree(path_counts, num_nodes)
    return 1 + sum(path_counts.get(path, 0) for path in shape.paths) / max(1, anchors)


def measure(ranks: torch.Tensor) -> Evaluation:
    """The evaluation of a head from the ranks [A, K] of the true tokens."""
    anchors, depth = ranks.shape
    right = ranks == 0
    lengths = chain_lengths(ranks)
    reached = [int((lengths >= k).sum()) for k in range(depth + 1)]
    counts = count_paths(ranks)
    return Evaluation(
        anchors=anchors,
        top1=tuple(int(right[:, k].sum()) / max(1, anchors) for k in range(depth)),
        alpha=tuple(reached[k + 1] / max(1, reached[k]) for k in range(depth)),
        tau_chain=1 + sum(reached[1:]) / max(1, anchors),
        tau_tree={size: expected_tau(counts, size, anchors) for size in TREE_SIZES},
        path_counts=counts,
    )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    head: DraftHead,
    target: Target,
    data: PackedData,
    batch_rows: int,
) -> Evaluation:
    """Measure a head on held-out rows, shared among the processes; all return the result.

    `model` is the prepared `loop.LossModule` around `head`.
    """
    rows = range(len(data.rows))
    batches: Sequence[Sequence[int]] = [
        rows[start : start + batch_rows] for start in range(0, len(rows), batch_rows)
    ]
    rounds = -(-len(batches) // accelerator.num_processes)
    ranks = []
    model.eval()
    for turn in range(rounds):
        index = turn * accelerator.num_processes + accelerator.process_index
        # A sharded head runs in all processes at once, so a process without a batch runs one with
        # nothing to measure.
        tokens = data.batch(batches[min(index, len(batches) - 1)])
        tokens = tokens if index < len(batches) else tokens.unsupervised()
        batch = read_features(target, tokens, head.features_needed, accelerator.mixed_precision)
        _, loss = model(batch)
        ranks.append(loss.ranks.to("cpu", torch.int8))
    model.train()
    return measure(torch.cat(gather_object([torch.cat(ranks)])).long())
