"""Losses against independent float64 formulas, and chunked against whole."""

import math

import pytest
import torch

from drafthead.heads import losses
from drafthead.heads.base import MAX_RANK, HeadBatch
from drafthead.heads.losses import hard_cross_entropy, in_chunks, ranks_of, soft_cross_entropy
from drafthead.heads.target import Features, Target


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def log_probs(logits: torch.Tensor) -> list[list[float]]:
    """Log softmax of each row, by hand in Python's float64."""
    table = []
    for row in logits.double().tolist():
        top = max(row)
        normalizer = top + math.log(sum(math.exp(x - top) for x in row))
        table.append([x - normalizer for x in row])
    return table


def test_hard_loss_is_the_summed_negative_log_probability_of_the_labels():
    logits, labels = random_logits(6, 11, 0), torch.tensor([0, 3, 10, 3, 7, 1])
    expected = -sum(row[i] for row, i in zip(log_probs(logits), labels.tolist(), strict=True))
    assert hard_cross_entropy(logits, labels).sum().item() == pytest.approx(expected, rel=1e-5)


def test_soft_loss_is_the_summed_cross_entropy_with_the_targets_distribution():
    draft, target = random_logits(6, 11, 0), random_logits(6, 11, 1)
    expected = -sum(
        math.exp(t) * d
        for t_row, d_row in zip(log_probs(target), log_probs(draft), strict=True)
        for t, d in zip(t_row, d_row, strict=True)
    )
    assert soft_cross_entropy(draft, target).sum().item() == pytest.approx(expected, rel=1e-5)


def test_soft_loss_of_a_certain_target_is_the_hard_loss():
    draft, labels = random_logits(4, 9, 0), torch.tensor([1, 2, 8, 0])
    certain = 1000 * torch.nn.functional.one_hot(labels, 9).float()
    torch.testing.assert_close(
        soft_cross_entropy(draft, certain), hard_cross_entropy(draft, labels)
    )


def test_no_positions_make_no_loss():
    none = torch.zeros(0, dtype=torch.long)
    assert hard_cross_entropy(torch.zeros(0, 5), none).shape == (0,)
    assert soft_cross_entropy(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0,)
    assert ranks_of(torch.zeros(0, 5), none, most=3).shape == (0,)


def test_ranks_count_the_larger_logits():
    logits = torch.tensor([[1.0, 3, 2]]).expand(3, 3)
    assert ranks_of(logits, torch.tensor([0, 1, 2]), most=10).tolist() == [2, 0, 1]
    assert ranks_of(logits, torch.tensor([0, 1, 2]), most=1).tolist() == [1, 0, 1]


def test_chunks_change_neither_the_loss_nor_its_gradients(monkeypatch: pytest.MonkeyPatch):
    vocab, rows = 13, 10
    labels = torch.arange(rows)

    def loss_and_gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, vocab)
        hidden = torch.randn(rows, 4, requires_grad=True)
        calls = []

        def judge(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(len(labels))
            logits = layer(hidden)
            return hard_cross_entropy(logits, labels), ranks_of(logits, labels, most=3)

        per_row, ranks = in_chunks(judge, vocab, hidden, labels)
        total = per_row.sum()
        total.backward()
        sizes.append(calls)
        return [total, ranks, hidden.grad, layer.weight.grad, layer.bias.grad]

    sizes: list[list[int]] = []
    whole = loss_and_gradients()
    monkeypatch.setattr(losses, "MAX_LOGITS", 3 * vocab)
    chunked = loss_and_gradients()
    # Each chunk once forward and, in whatever order, once more for the backward pass.
    assert sizes == [[10], [3, 3, 3, 1, *sizes[1][4:]]]
    assert sorted(sizes[1][4:]) == [1, 3, 3, 3]
    for found, expected in zip(chunked, whole, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", ["hard", "soft"])
def test_medusa_loss_equals_a_loop_over_anchors_and_heads(loss: str, target: Target, make_head):
    """Two segments in a row and padding: no label may be taken from across a border."""
    head = make_head("medusa", target, num_heads=3, loss=loss, depth_decay=0.5)
    segments = [1] * 7 + [2] * 5 + [0] * 2
    supervised = [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    ids = torch.randint(0, target.vocab_size, (14,), generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(14, target.hidden_size, generator=torch.Generator().manual_seed(1))
    batch = HeadBatch(
        ids[None],
        torch.tensor([segments]),
        torch.tensor([supervised]).bool(),
        Features(hidden[None]),
    )
    total, counts, ranks = 0.0, [0, 0, 0], []
    for place in range(13):
        if not (supervised[place + 1] and segments[place + 1] == segments[place]):
            continue
        ranks.append([MAX_RANK] * 3)
        for k in range(3):
            there = place + k + 2
            if there >= 14 or segments[there] != segments[place] or not supervised[there]:
                continue
            logits = head.logits(hidden[place], k, target)
            (draft,) = log_probs(logits[None])
            (wanted,) = log_probs(target.project(hidden[there - 1])[None])
            label = int(ids[there])
            soft = sum(math.exp(w) * d for w, d in zip(wanted, draft, strict=True))
            total -= 0.5**k * (draft[label] if loss == "hard" else soft)
            counts[k] += 1
            ranks[-1][k] = min(MAX_RANK, int((logits > logits[label]).sum()))
    judged = head.loss(batch, target)
    assert judged.total.item() == pytest.approx(total, rel=1e-4)
    assert judged.depth_counts.tolist() == counts
    assert judged.ranks.tolist() == ranks
