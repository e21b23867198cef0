"""Drafts that know the numbers of the target's draws."""

import torch

from drafthead.core.coupling import NextDraws
from drafthead.core.sampling import RowRandom, RowSampling, SamplingConfig, probabilities, race

CPU, COUNT, VOCAB = torch.device("cpu"), 100_000, 12


def laws() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [V] of a target and of a draft that resembles it."""
    target, noise = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    return 1.5 * target, 1.5 * target + noise


def draws(sampling: SamplingConfig) -> NextDraws:
    """The numbers of many rows, for one position."""
    random = RowRandom(range(COUNT), CPU)
    random.begin_step([3] * COUNT)
    return NextDraws(random.ahead(1), RowSampling((sampling,) * COUNT).settings(CPU))


def guesses(logits: torch.Tensor, known: NextDraws, count: int) -> torch.Tensor:
    """The tokens [COUNT, count] that a draft with these logits [V] guesses."""
    ordered, ids = logits.sort(descending=True)
    places = known.best(0, ordered.expand(COUNT, 1, -1), ids.expand(COUNT, 1, -1), count)[1]
    return ids[places[:, 0]]


def test_guesses_are_right_as_often_as_the_formula_says() -> None:
    """Within 5 standard errors, far above the chance of independent draws and of the best token."""
    target, draft = laws()
    known = draws(SamplingConfig(1.0))
    drawn = race(target.softmax(0).expand(COUNT, -1), known.keys[:, 0])
    hits = (guesses(draft, known, 1)[:, 0] == drawn).float().mean()
    p, q = target.softmax(0), draft.softmax(0)
    largest = torch.maximum(p / p[:, None], q / q[:, None])  # [x, y]
    expected = (1 / largest.sum(1)).sum()
    assert abs(hits - expected) < 5 * (0.25 / COUNT) ** 0.5
    overlap = torch.minimum(p, q).sum()
    assert overlap / (2 - overlap) < expected < overlap
    assert expected > max(p[q.argmax()], (p * q).sum()) + 0.1


def test_the_targets_own_law_is_guessed_without_error_and_more_guesses_help() -> None:
    target, draft = laws()
    for sampling in (SamplingConfig(1.0), SamplingConfig(0.7, top_k=6, top_p=0.8, min_p=0.05)):
        known = draws(sampling)
        drawn = race(probabilities(target, sampling).expand(COUNT, -1), known.keys[:, 0])
        assert torch.equal(guesses(target, known, 1)[:, 0], drawn)
        three = guesses(draft, known, 3) == drawn[:, None]
        shares = three.float().mean(0)
        assert shares[0] > shares[1] > shares[2], "from the likeliest on"


def test_the_guessed_chances_are_a_law_over_all_tokens() -> None:
    _, draft = laws()
    ordered, ids = draft.sort(descending=True)
    known = draws(SamplingConfig(1.0))
    log_probs, _ = known.best(0, ordered.expand(COUNT, 1, -1), ids.expand(COUNT, 1, -1), VOCAB)
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(COUNT, 1))
    assert (log_probs.diff(dim=-1) <= 0).all()


def test_greedy_rows_among_others_are_offered_their_most_probable_tokens() -> None:
    """By the probabilities that they have without races; the others guess as if alone."""
    _, draft = laws()
    ordered, ids = (each.expand(2, 1, -1) for each in draft.sort(descending=True))
    greedy, drawn = SamplingConfig(), SamplingConfig(0.7, top_p=0.8)
    keys = torch.arange(2)[:, None]
    both = NextDraws(keys, RowSampling((greedy, drawn)).settings(CPU))
    log_probs, places = both.best(0, ordered, ids, 5)
    assert torch.equal(places[0, 0], torch.arange(5))
    assert torch.allclose(log_probs[0, 0], ordered[0, 0].log_softmax(-1)[:5])
    alone = NextDraws(keys[1:], RowSampling((drawn,)).settings(CPU))
    assert torch.equal(places[1:], alone.best(0, ordered[1:], ids[1:], 5)[1])
