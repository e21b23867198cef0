"""Probabilities and draws, against transformers' own processors and against exact laws."""

from itertools import product

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from drafthead.core import sampling
from drafthead.core.errors import UserError
from drafthead.core.host import to_device
from drafthead.core.sampling import (
    GOLDEN,
    LEAST_DRAFT_PROBABILITY,
    NO_TOKEN,
    STRIDE,
    RowRandom,
    RowSampling,
    SamplingConfig,
    arrival_times,
    draft_distribution,
    draw,
    draw_without_replacement,
    kept_of_sorted,
    most_probable,
    probabilities,
    race,
    sample,
    signed,
)
from drafthead.core.settings import LEAST_TEMPERATURE

GRID = product(
    (0.5, 1.0, 1.7),  # temperature
    (0, 1, 5, 99),  # top_k
    (1.0, 0.9, 0.3),  # top_p
    (0.0, 0.1, 1.0),  # min_p
    (1.0, 0.8, 0.2),  # typical_p
)


LAWS = (
    SamplingConfig(),
    SamplingConfig(0.7),
    SamplingConfig(1.0, top_k=3),
    SamplingConfig(0.5, top_p=0.8, min_p=0.02),
    SamplingConfig(),
    SamplingConfig(0.7),
    SamplingConfig(1.0, typical_p=0.5),
)


def warped_by_transformers(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    if sampling.typical_p < 1:
        scores = TypicalLogitsWarper(sampling.typical_p)(None, scores)
    return scores


def settings_of(sampling: SamplingConfig, rows: int) -> torch.Tensor:
    """What graphs take [B, 4] of rows that are all sampled alike."""
    return RowSampling((sampling,) * rows).settings(torch.device("cpu"))


def test_probabilities_equal_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(14, 40, generator=generator)
    logits[7:] = logits[7:].round()  # many ties, as in 16 bits
    for numbers in GRID:
        sampling = SamplingConfig(*numbers)
        ours = probabilities(logits, sampling)
        theirs = warped_by_transformers(logits, sampling).softmax(-1)
        assert torch.allclose(ours[:7], theirs[:7], atol=1e-7), sampling
        # Which of several equal tokens top-p keeps is left to an unstable sort there.
        assert torch.allclose(ours.sort().values, theirs.sort().values, atol=1e-7), sampling
        of_a_tree = probabilities(logits.view(14, 1, 40).expand(14, 3, 40), sampling)
        assert of_a_tree.equal(ours[:, None].expand(14, 3, 40)), "any leading shape"
        if sampling.typical_p == 1:  # without branches, as in graphs
            ordered, ids = logits.sort(descending=True, stable=True)
            settings = settings_of(sampling, 14)
            kept = kept_of_sorted(ordered / sampling.temperature, settings).softmax(-1)
            again = torch.zeros_like(kept).scatter(-1, ids, kept)
            assert torch.allclose(again, ours, atol=1e-7), sampling


def test_of_equal_tokens_top_p_keeps_the_first() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).log()
    sampling = SamplingConfig(1.0, top_p=0.3)
    assert probabilities(logits, sampling).tolist() == [[0, 1, 0, 0]]
    assert drawn(logits.expand(20, -1), sampling, torch.arange(20)).tolist() == [1] * 20


def test_top_p_keeps_no_more_than_reaches_it() -> None:
    """The first token's mass is top_p itself, so the second is not needed."""
    sampling = SamplingConfig(1.0, top_p=0.5)
    assert probabilities(torch.zeros(2), sampling).tolist() == [1, 0]
    assert TopPLogitsWarper(0.5)(None, torch.zeros(1, 2)).isneginf().sum() == 1


def test_typical_tokens_are_those_of_average_surprise() -> None:
    probs = probabilities(torch.tensor([0.6, 0.3, 0.1]).log(), SamplingConfig(1, typical_p=0.2))
    assert probs.tolist() == [0, 1, 0]


def test_temperature_zero_is_certain_of_the_first_largest_logit() -> None:
    probs = probabilities(torch.tensor([[1.0, 5, 5, 2]]), SamplingConfig(0))
    assert probs.tolist() == [[0, 1, 0, 0]]


def test_sampling_inverts_the_cumulative_mass() -> None:
    probs = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    uniform = torch.tensor([0.0, 0.19, 0.2001, 0.69, 0.71, 0.99999994])
    assert sample(probs.expand(6, 6), uniform).tolist() == [1, 1, 3, 3, 4, 4]
    assert sample(7 * probs[None], torch.tensor([0.69])).tolist() == [3]  # need not sum to 1


def drawn(logits: torch.Tensor, sampling: SamplingConfig, keys: torch.Tensor) -> torch.Tensor:
    """Tokens [M] drawn as the graph of a step draws them, from logits [M, V] with keys [M]."""
    settings = settings_of(sampling, len(keys))
    return draw(logits[:, None], keys[:, None], settings, not sampling.whole)[:, 0]


@pytest.mark.parametrize("law", [probabilities, draft_distribution])
def test_rows_have_laws_of_their_own(law) -> None:
    """Bit by bit those that they have alone; greedy rows too, where some have no law."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(LAWS), 3, 40, generator=generator).round()
    logits[[0, 4], 1] = torch.nan
    found = law(logits, RowSampling(LAWS))
    alone = torch.cat([law(logits[n : n + 1], each) for n, each in enumerate(LAWS)])
    assert torch.equal(found.nan_to_num(-1), alone.nan_to_num(-1))
    assert not probabilities(logits[:1, 1], SamplingConfig()).any(), "no token is the largest"


def test_graphs_draw_each_row_as_if_it_were_alone() -> None:
    """Bit by bit, whether other rows have filters or not; greedy ones their most probable token."""
    generator = torch.Generator().manual_seed(0)
    laws = [law for law in LAWS if law.typical_p == 1]
    logits = torch.randn(len(laws), 200, 40, generator=generator).round()
    logits[0, :3, 5] = torch.tensor([torch.nan, -torch.inf, 9.0])
    logits[0, 3] = -torch.inf
    keys = torch.arange(200).expand(len(laws), -1)
    settings = RowSampling(tuple(laws)).settings(torch.device("cpu"))
    together = draw(logits, keys, settings, True)
    for number, row in enumerate(laws):
        if row.greedy:
            assert torch.equal(together[number], most_probable(logits[number]))
        else:
            assert torch.equal(together[number], drawn(logits[number], row, keys[0]))


def test_arrival_times_come_from_splitmix() -> None:
    """The first numbers of that generator's reference implementation for the seed 1234567."""
    numbers = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    uniform = (torch.tensor([n >> 1 for n in numbers]).double() + 0.5) * 2**-63
    key = 1234567 * pow(GOLDEN, -1, 2**64) % 2**64
    times = arrival_times(torch.tensor([signed(key)]), torch.arange(4))[0]
    assert torch.allclose(times.double(), -torch.log1p(-uniform), rtol=1e-6)
    assert (arrival_times(torch.tensor([signed(2**64 - 1)]), torch.arange(10**5)) > 0).all()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(1.0),
        SamplingConfig(0.7, top_p=0.9),
        SamplingConfig(1.3, top_k=20, min_p=0.02),
        SamplingConfig(1.0, top_k=30, top_p=0.7),
    ],
    ids=str,
)
def test_races_follow_the_law(sampling) -> None:
    """Eager and as in graphs, the same tokens. A false alarm: 1 in a million runs (5 sigma)."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    law, count = probabilities(logits, sampling), 100_000
    random = RowRandom([5], torch.device("cpu"))
    random.begin_step([0])
    keys = random.ahead(count)[0]
    tokens = race(law.expand(count, -1), keys)
    assert torch.equal(drawn(logits.expand(count, -1), sampling, keys), tokens)
    assert not tokens.bincount(minlength=50)[law == 0].any()
    expected = (law * count)[law > 0]
    chi_square = ((tokens.bincount(minlength=50)[law > 0] - expected) ** 2 / expected).sum()
    cells = len(expected) - 1
    assert abs(chi_square - cells) < 6 * (2 * cells) ** 0.5


def test_a_race_is_exact_for_tokens_far_below_the_best() -> None:
    """Probabilities of 1e-12 among 50,000 tokens: what is drawn of them follows their proportions.

    With arrival times of 32 bits such tokens would be off by their own size.
    """
    law = torch.full((20_000,), 1e-12)
    law[::2] *= 3
    tokens = race(law.expand(400, -1), torch.arange(400) * 7919)
    assert abs((tokens % 2 == 0).float().mean() - 0.75) < 5 * (0.1875 / 400) ** 0.5


NO_LAWS = {"a NaN": [0.0, torch.nan, 1], "only NaN": [torch.nan] * 3, "only -inf": [-torch.inf] * 3}


@pytest.mark.parametrize("logits", [*NO_LAWS.values(), [0.0, torch.inf, 1]], ids=str)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_without_a_law_give_no_token(logits, top_p) -> None:
    """transformers raises here; the rows beside it are sound."""
    batch, uniform = torch.tensor([[0.0, 19, 0], logits, [0.0, 19, 0]]), torch.full((3,), 0.5)
    with pytest.raises(RuntimeError, match="inf"):
        torch.multinomial(batch.softmax(-1), 1)
    sampling = SamplingConfig(1.0, top_p=top_p)
    probs = probabilities(batch, sampling)
    assert sample(probs, uniform).tolist() == [1, NO_TOKEN, 1]
    assert race(probs, torch.arange(3)).tolist() == [1, NO_TOKEN, 1]
    assert drawn(batch, sampling, torch.arange(3)).tolist() == [1, NO_TOKEN, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits", NO_LAWS.values(), ids=NO_LAWS)
def test_no_logit_is_the_most_probable_one_where_one_is_nan_or_all_are_forbidden(
    logits, dtype
) -> None:
    batch = torch.tensor([[0.0, 9, 0], logits, [0.0, torch.inf, 0]], dtype=dtype)
    assert most_probable(batch).tolist() == [1, NO_TOKEN, 1]


def test_no_temperature_that_is_allowed_overflows() -> None:
    logits = torch.tensor([[3e7, -3e7, 2.5e7]])
    assert drawn(logits, SamplingConfig(LEAST_TEMPERATURE), torch.arange(1)).tolist() == [0]


def test_draft_probabilities_are_normal_numbers_of_one_law_or_zero() -> None:
    """Of any gap; what comes after the best keeps its proportions."""
    gaps = torch.tensor([0.0, 1, 60, 87, 95, 103, 110, 400, 460, 461, 700, 800, torch.inf])
    probs = draft_distribution(-gaps, SamplingConfig(1.0))
    assert probs.dtype == torch.float64 and probs.sum() == 1
    assert probs.gt(0).tolist() == [True] * 9 + [False] * 4
    assert probs[8] >= LEAST_DRAFT_PROBABILITY
    assert torch.allclose(probs[:9].log().diff(), -gaps[:9].diff().double(), rtol=1e-12)
    colder = draft_distribution(-gaps, SamplingConfig(0.01))
    assert torch.equal(colder, draft_distribution(-100 * gaps, SamplingConfig(1.0)))


def test_a_draft_without_numbers_proposes_nothing() -> None:
    assert draft_distribution(torch.tensor([0.0, torch.nan]), SamplingConfig(1.0)).eq(0).all()


def test_the_least_probable_children_are_drawn_by_their_proportions() -> None:
    """After a certain first child: 3 to 1, whatever their probability is beside that of the first.

    The odds of a false alarm are 1 to a million (5 standard errors).
    """
    count = 40_000
    uniform = torch.rand(count, 3, generator=torch.Generator().manual_seed(0)).double()
    for tiny in (1e-10, 1e-40, 1e-199):
        probs = torch.tensor([1.0, 3 * tiny, tiny], dtype=torch.float64).expand(count, 3)
        children = draw_without_replacement(probs, 2, uniform)
        assert (children[:, 0] == 0).all()
        assert abs((children[:, 1] == 1).float().mean() - 0.75) < 5 * (0.1875 / count) ** 0.5


def test_draws_without_replacement_follow_successive_sampling() -> None:
    """P(first a, then b) = a x b / (1 - a); chance of a false alarm about 1e-6 (5 sigma)."""
    probs, count = torch.tensor([0.5, 0.3, 0.2]), 40_000
    uniform = torch.rand(count, 3, generator=torch.Generator().manual_seed(0))
    children = draw_without_replacement(probs.expand(count, 3), 2, uniform)
    for a in range(3):
        for b in range(3):
            share = ((children[:, 0] == a) & (children[:, 1] == b)).float().mean().item()
            expected = 0 if a == b else float(probs[a] * probs[b] / (1 - probs[a]))
            assert abs(share - expected) < 5 * (0.25 / count) ** 0.5


def test_a_rows_numbers_depend_on_its_seed_and_length_alone() -> None:
    device = torch.device("cpu")
    batch, alone = RowRandom([3, 4], device), RowRandom([4], device)
    batch.begin_step([10, 20])
    alone.begin_step([20])
    alone.uniform(2)  # how many numbers an earlier step took must not matter
    alone.begin_step([20])
    assert batch.uniform(5)[1].equal(alone.uniform(5)[0])
    batch.begin_step([10, 21])
    assert not batch.uniform(5)[1].equal(alone.uniform(5)[0])


def mixed(seed: int, count: int) -> int:
    """SplitMix64's number for a step, in whole numbers of Python."""
    mask = 2**64 - 1
    z = (seed * GOLDEN + (count + 1) * STRIDE) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_numbers_of_the_next_tokens_are_those_of_their_own_steps() -> None:
    random = RowRandom([3, 4], torch.device("cpu"))
    random.begin_step([10, 20])
    ahead = random.ahead(3)
    assert ahead[1].tolist() == [signed(mixed(4, 20 + place)) for place in range(3)]
    for place in range(3):
        random.begin_step([10 + place, 20 + place])
        assert random.ahead(1).equal(ahead[:, place : place + 1])
        random.begin_step([10, 20], torch.tensor([place, place]))  # the device alone knows them
        assert random.ahead(1).equal(ahead[:, place : place + 1])


def test_numbers_of_a_step_are_made_once_for_a_draft_and_the_pass_over_it(monkeypatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        sampling, "to_device", lambda keys, device: made.append(keys) or to_device(keys, device)
    )
    random = RowRandom([3, 4], torch.device("cpu"))
    for step in range(2):
        random.begin_step([step, step])
        assert random.ahead(4)[:, :2].equal(random.ahead(5)[:, :2])
        assert random.ahead(1).is_contiguous()
    assert len(made) == 2


@pytest.mark.parametrize("step", ["token", "seed"])
def test_the_numbers_of_tokens_are_uniform_and_do_not_follow_from_their_neighbours(step) -> None:
    count, bins = 200_000, 100
    by_token = step == "token"
    random = RowRandom([7] if by_token else range(count), torch.device("cpu"))
    random.begin_step([0] if by_token else [5] * count)
    keys = random.ahead(count if by_token else 1).flatten()
    numbers = keys.double() * 2**-64 + 0.5
    assert numbers.min() >= 0 and numbers.max() < 1
    for values in (numbers, (numbers[1:] - numbers[:-1]) % 1):  # the differences are uniform, too
        found = values.mul(bins).long().bincount(minlength=bins)
        expected = len(values) / bins
        chi_square = ((found - expected) ** 2 / expected).sum()
        assert abs(chi_square - (bins - 1)) < 4 * (2 * (bins - 1)) ** 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 1e-38},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1e-46},
        {"min_p": 1.5},
        {"typical_p": 0},
    ],
)
def test_impossible_settings_are_refused(options: dict) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        SamplingConfig(**options)
