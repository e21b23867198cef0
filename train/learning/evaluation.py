"""Measures of drafting on held-out conversations, from the ranks of the true tokens alone.

`tau` is that of greedy decoding: each answer is decoded again, from the ranks, and only the
positions at which a step begins count. All positions alike, as they are trained, would be another
number: decoding drafts after a token that the head missed.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedTokenizerBase

from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Path
from drafthead.heads.base import DraftHead
from drafthead.heads.growing.static import grow_tree
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.train.data.packing import PackedData
from drafthead.train.features.reading import read_features
from drafthead.train.learning.ranks import Ranked, RankedAnchors, chain_lengths, count_paths

TREE_SIZES = (8, 16, 32, 64)  # nodes, the root included
SHORT_CHAIN = 3  # drafted tokens, as other engines report MTP layers
CATEGORY_NODES = 16
# Tokens before a step at which a row of `by_length` begins.
BANDS = {"before": (0, 500, 2_000, 4_000, 8_000, 16_000), "in the answer": (0, 100, 1_000)}


@dataclass(frozen=True)
class Evaluation:
    """Accuracy of a head. `tau` is that of greedy decoding, the bonus tokens included."""

    anchors: int  # positions from which the head drafted
    top1: tuple[float, ...]  # share of anchors whose depth-k token was the first guess
    top8: tuple[float, ...]  # the same for the first eight guesses: what a wide tree could accept
    alpha: tuple[float, ...]  # the same, among the anchors whose earlier guesses were all right
    tau_chain: float
    tau_short_chain: float  # of `SHORT_CHAIN` tokens, or of the head's depth
    tau_tree: dict[int, float]  # nodes -> tau of the best static tree of that size
    path_counts: dict[Path, int]  # see heads.growing.static.grow_tree
    # Tau of the tree of CATEGORY_NODES nodes by kind of request, where rows say it.
    categories: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Everything but the path counts, ready for JSON."""
        values = asdict(self)
        del values["path_counts"]
        return values


def measure(ranked: RankedAnchors) -> Evaluation:
    """The evaluation of a head from the ranks of the true tokens."""
    ranks = ranked.ranks
    anchors, depth = ranks.shape
    lengths = chain_lengths(ranks)
    reached = [int((lengths >= k).sum()) for k in range(depth + 1)]
    counts = count_paths(ranks)
    chain, short, *trees = (ranked.tau(tree) for tree in trees_of(counts, depth).values())
    return Evaluation(
        anchors=anchors,
        top1=share_among(ranks, 1),
        top8=share_among(ranks, 8),
        alpha=tuple(reached[k + 1] / max(1, reached[k]) for k in range(depth)),
        tau_chain=chain,
        tau_short_chain=short,
        tau_tree=dict(zip(TREE_SIZES, trees, strict=True)),
        path_counts=counts,
    )


def trees_of(counts: dict[Path, int], depth: int) -> dict[str, set[Path]]:
    """The chains and the best static trees that heads are measured with, by name."""
    lengths = {"chain": depth, f"chain of {SHORT_CHAIN}": min(depth, SHORT_CHAIN)}
    chains = {name: {(0,) * n for n in range(1 + most)} for name, most in lengths.items()}
    trees = {f"{size} nodes": {(), *grow_tree(counts, size).paths} for size in TREE_SIZES}
    return chains | trees


def share_among(ranks: torch.Tensor, guesses: int) -> tuple[float, ...]:
    """The share of anchors whose depth-k token was among the first guesses, from ranks [A, K]."""
    return tuple((ranks < guesses).double().mean(dim=0).nan_to_num().tolist())


def evaluation_of(ranked: RankedAnchors, data: PackedData) -> Evaluation:
    """Return what was measured on rows, by kind of request as well."""
    found = measure(ranked)
    return replace(found, categories=by_category(ranked, found.path_counts, data))


@torch.no_grad()
def read_ranks(
    accelerator: Accelerator,
    model: nn.Module,
    head: DraftHead,
    target: Target,
    data: PackedData,
    batch_rows: int,
    on_batch: Callable[[], object] = lambda: None,
) -> RankedAnchors:
    """Ranks on held-out rows, shared among the processes; all return the result.

    `model` is a `step.LossModule` around `head`. `on_batch` is called after each batch.
    """
    rows = range(len(data.rows))
    batches: Sequence[Sequence[int]] = [
        rows[start : start + batch_rows] for start in range(0, len(rows), batch_rows)
    ]
    rounds = -(-len(batches) // accelerator.num_processes)
    parts: list[RankedAnchors] = []
    model.eval()
    for turn in range(rounds):
        index = turn * accelerator.num_processes + accelerator.process_index
        # A sharded head runs in all processes at once, so a process without a batch runs one with
        # nothing to measure.
        tokens = data.batch(batches[min(index, len(batches) - 1)])
        if index >= len(batches):
            tokens = replace(tokens, supervised=torch.zeros_like(tokens.supervised))
        batch = read_features(target, tokens, head.features_needed, accelerator.mixed_precision)
        _, loss = model(batch)
        parts.append(ranked_anchors(batch, loss.ranks, first_row=index * batch_rows))
        on_batch()
    model.train()
    return RankedAnchors.joined(gather_object(parts))


def by_category(
    ranked: RankedAnchors, counts: dict[Path, int], data: PackedData
) -> dict[str, float]:
    """Tau by kind of request, with the best tree for all of them."""
    tree = {(), *grow_tree(counts, CATEGORY_NODES).paths}
    kinds = {
        (row, place): data.sequences.categories[number]
        for row, numbers in enumerate(data.rows)
        for place, number in enumerate(numbers, start=1)
    }
    found = ranked.tau_by(tree, [kinds[key] for key in ranked.conversations])
    names = sorted({kind for kind in kinds.values() if kind is not None})
    return {name: found.get(name, 1.0) for name in names}


def by_length(answers: Ranked) -> dict[str, dict[str, float]]:
    """Tokens, and tau with the best trees for all answers, by the tokens before a step."""
    found, ranks = answers.ranks, answers.ranks.ranks
    trees = trees_of(count_paths(ranks), ranks.shape[1])
    rows: dict[str, dict[str, float]] = {}
    for what, counts in tokens_before(answers).items():
        bands = [BANDS[what][bisect(BANDS[what], count) - 1] for count in counts]
        taus = {name: found.tau_by(tree, bands) for name, tree in trees.items()}
        for band, tokens in sorted(Counter(bands).items()):
            by_tree = {name: tau[band] for name, tau in taus.items()}
            rows[f"{what}: from {band:,}"] = {"tokens": tokens, **by_tree}
    return rows


def tokens_before(answers: Ranked) -> dict[str, list[int]]:
    """Tokens before the root of each anchor, of its conversation and of its answer."""
    (found, data), before, inside = answers, list[int](), list[int]()
    anchors = [(*key, at) for key, at in zip(found.conversations, found.anchors, strict=True)]
    for last, (row, segment, anchor) in zip([None, *anchors], anchors, strict=False):
        start = sum(int(data.sequences.lengths[n]) for n in data.rows[row][: segment - 1])
        before.append(anchor + 1 - start)
        inside.append(inside[-1] + 1 if last == (row, segment, anchor - 1) else 0)
    return {"before": before, "in the answer": inside}


def ranked_anchors(batch: HeadBatch, ranks: torch.Tensor, first_row: int = 0) -> RankedAnchors:
    """Ranks [A, K] after all anchors of a batch whose first row has the number `first_row`."""
    rows, anchors = anchor_positions(batch)
    segments = batch.segments[rows, anchors]
    keys = list(zip((rows + first_row).tolist(), segments.tolist(), strict=True))
    return RankedAnchors(ranks.to("cpu", torch.int8), keys, anchors.tolist())


def verdict(
    loss: float,
    evaluation: Evaluation | None,
    held_out: PackedData | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[str]:
    """Sentences about a head that learnt nothing: its last loss is 0, or one token guesses as well.

    The head's first guess is compared with the token that held-out answers have most often.
    """
    if loss == 0:
        yield "the loss of the last step is exactly 0: the head learns nothing from these rows"
    if evaluation is None or held_out is None:
        return
    token, often, positions = held_out.sequences.most_frequent()
    share = evaluation.top1[0] * evaluation.anchors / max(1, positions)
    if share > often / max(1, positions):
        return
    name = repr(tokenizer.decode([token])) if tokenizer is not None else str(token)
    yield (
        f"held out, the head's first guess is right for {share:.1%} of the tokens after an "
        f"answer's first one, and {name} alone would be for {often / max(1, positions):.1%}: the "
        "head drafts no better than that; train longer, on more answers, or with another "
        "optimizer.lr"
    )
