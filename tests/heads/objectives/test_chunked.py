"""Losses chunk by chunk against the whole: sums, gradients, and memory."""

from collections.abc import Iterator

import pytest
import torch
from peak_memory import PeakMemory

from drafthead.heads.objectives import chunked
from drafthead.heads.objectives.chunked import Part, in_chunks
from drafthead.heads.objectives.losses import TOKEN_LOSSES, hard_cross_entropy, ranks_of

ROWS, VOCAB = 10, 13


def two_parts(some: torch.nn.Linear, other: torch.nn.Linear, sizes: list[int]) -> chunked.Parts:
    """The loss of one layer, and half of the loss of another one that knows the first."""

    def parts(hidden: torch.Tensor, labels: torch.Tensor) -> Iterator[Part]:
        sizes.append(len(labels))
        for weight, logits in ((1.0, some(hidden)), (0.5, some(hidden) + other(hidden))):
            losses = hard_cross_entropy(logits, labels)
            yield weight * losses.sum(), losses, ranks_of(logits, labels, most=3)

    return parts


def judged(sizes: list[int], in_pieces: bool = False) -> list[torch.Tensor]:
    """All that comes out for two layers, and the gradients; `in_pieces` as ZeRO-3 has them."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, VOCAB) for _ in range(3)]
    before = torch.randn(ROWS, 4, requires_grad=True)
    parameters = [p for layer in layers for p in layer.parameters()]
    if in_pieces:
        parameters[0].ds_id = 0
    loss = in_chunks(VOCAB, parameters)(two_parts(layers[0], layers[1], sizes))
    total, known = loss(before.tanh(), torch.arange(ROWS))
    (3 * total).backward()
    assert layers[2].weight.grad is None  # no part reads it
    gradients = [p.grad for p in parameters[:4]]
    return [total, *(column for of_part in known for column in of_part), before.grad, *gradients]


def by_hand() -> list[torch.Tensor]:
    torch.manual_seed(0)
    some, other, _ = (torch.nn.Linear(4, VOCAB) for _ in range(3))
    before = torch.randn(ROWS, 4, requires_grad=True)
    labels = torch.arange(ROWS)
    logits = [some(before.tanh()), some(before.tanh()) + other(before.tanh())]
    losses = [hard_cross_entropy(x, labels) for x in logits]
    total = losses[0].sum() + 0.5 * losses[1].sum()
    (3 * total).backward()
    known = [y for x, loss in zip(logits, losses, strict=True)
             for y in (loss, ranks_of(x, labels, 3))]  # fmt: skip
    return [total, *known, before.grad, *(p.grad for x in (some, other) for p in x.parameters())]


@pytest.mark.parametrize(("rows_at_once", "expected"), [(100, [10]), (3, [3, 3, 3, 1])])
def test_chunks_change_neither_the_loss_nor_its_gradients(
    rows_at_once: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "MAX_LOGITS", rows_at_once * VOCAB)
    sizes: list[int] = []
    torch.testing.assert_close(judged(sizes), by_hand())
    assert sizes == expected  # each chunk once


def test_with_parameters_in_pieces_chunks_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "MAX_LOGITS", 3 * VOCAB)
    sizes: list[int] = []
    torch.testing.assert_close(judged(sizes, in_pieces=True), by_hand())
    assert sorted(sizes) == [1, 1, *[3] * 6]


def test_without_gradients_there_is_the_sum_alone() -> None:
    with torch.no_grad():
        layer = torch.nn.Linear(4, VOCAB)
        hidden, labels = torch.randn(ROWS, 4), torch.arange(ROWS)
        loss = in_chunks(VOCAB, layer.parameters())(two_parts(layer, layer, []))
        total, ((losses, _), _) = loss(hidden, labels)
    assert not total.requires_grad
    torch.testing.assert_close(losses, hard_cross_entropy(layer(hidden), labels).detach())


def test_under_autocast_gradients_are_those_of_one_pass() -> None:
    """autocast keeps a weight that it has cast: each part must find its way back to it."""
    weight = torch.nn.Linear(4, VOCAB)
    hidden, labels = torch.randn(ROWS, 4), torch.arange(ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        parts = two_parts(weight, weight, [])
        total, _ = in_chunks(VOCAB, weight.parameters())(parts)(hidden, labels)
        (found,) = torch.autograd.grad(total, [weight.weight])
        whole = sum(part for part, *_ in parts(hidden, labels))
        (expected,) = torch.autograd.grad(whole, [weight.weight])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_memory_does_not_grow_with_the_positions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden_size, vocab, chunk = 2, 400, 10
    monkeypatch.setattr(chunked, "MAX_LOGITS", chunk * vocab)
    weight = torch.randn(hidden_size, vocab, requires_grad=True)

    def parts(hidden: torch.Tensor, labels: torch.Tensor) -> Iterator[Part]:
        logits = hidden @ weight
        losses = TOKEN_LOSSES[name].function(logits, logits.detach() + 1, labels)
        yield losses.sum(), losses, labels

    def peak(rows: int) -> int:
        hidden, labels = torch.randn(rows, hidden_size, requires_grad=True), torch.arange(rows)
        with PeakMemory(hidden, labels, weight) as memory:
            in_chunks(vocab, [weight])(parts)(hidden, labels)[0].backward()
        return memory.peak

    # 36 more chunks cost less than the logits of a single one.
    assert peak(400) - peak(40) < chunk * vocab * 4


def test_parameters_that_share_a_gradient_keep_their_own_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a sum autograd gives both terms one tensor: adding to it in place would count twice."""
    monkeypatch.setattr(chunked, "MAX_LOGITS", 3)
    some, other = (torch.zeros(1, requires_grad=True) for _ in range(2))
    rows = torch.randn(5, 1, requires_grad=True)

    @in_chunks(1, [some, other])
    def loss(chunk: torch.Tensor) -> Iterator[Part]:
        for _ in range(2):
            squares = (chunk + (some + other)).square()[:, 0]
            yield squares.sum(), squares, squares

    loss(rows)[0].backward()
    for found in (some.grad, other.grad, rows.grad.sum(0)):
        torch.testing.assert_close(found, 4 * rows.detach().sum(0))


@pytest.mark.parametrize("frozen", [False, True])
def test_without_gradients_none_are_computed(frozen, monkeypatch) -> None:
    """Evaluation costs no backward pass, also where the weights are to be trained."""
    torch.manual_seed(0)
    some, other = (torch.nn.Linear(4, VOCAB).requires_grad_(not frozen) for _ in range(2))
    parameters, rows = [*some.parameters(), *other.parameters()], torch.randn(ROWS, 4)
    loss = in_chunks(VOCAB, parameters)(two_parts(some, other, []))
    expected, _ = loss(rows, torch.arange(ROWS))
    asked: list[bool] = []
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: asked.append(True))
    monkeypatch.setattr(
        chunked, "_add_gradients", lambda part, *_: asked.append(part.requires_grad)
    )
    with torch.no_grad():
        total, _ = loss(rows, torch.arange(ROWS))
    assert torch.equal(total, expected) and not any(asked) and not total.requires_grad
