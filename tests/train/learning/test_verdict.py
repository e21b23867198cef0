"""What is said of a head that has learnt nothing."""

import pytest
import torch
from tiny import byte_tokenizer

from drafthead.train.data.packing import PackedData, pack_sequences
from drafthead.train.data.sequences import TokenSequence, TokenTable, mixed
from drafthead.train.learning.evaluation import STEPS_LOOKED_AT, LastSteps, measure, verdict
from drafthead.train.learning.ranks import RankedAnchors

TOKENIZER = byte_tokenizer()


def table(*rows: tuple[str, str]) -> TokenTable:
    """Letters as tokens; the second text of each row is the answer."""

    def ids(text: str) -> list[int]:
        return TOKENIZER(text)["input_ids"]

    return TokenTable.of(
        TokenSequence(
            torch.tensor(ids(asked + answer), dtype=torch.int32),
            torch.tensor([False] * len(asked) + [True] * len(answer)),
        )
        for asked, answer in rows
    )


def packed(rows: TokenTable) -> PackedData:
    return pack_sequences(rows, 64, seed=0)


ROWS = table(("bbb", "abbc"), ("b", "bca"))  # after the first ones: b b c, c a


def last_steps(*steps: tuple[float, float], loss: float = 1.0) -> LastSteps:
    last = LastSteps()
    for right, guesses in steps:
        last.add(loss, right, guesses)
    return last


def test_the_most_frequent_token_follows_another_of_its_answer() -> None:
    token, often, positions = ROWS.most_frequent()
    assert TOKENIZER.decode([token]) in ("b", "c") and (often, positions) == (2, 5)
    twice = mixed([ROWS, table(("c", "ccc"))], [1.0, 2.0], seed=0)
    token, often, positions = twice.most_frequent()
    assert (TOKENIZER.decode([token]), often, positions) == ("c", 6, 9)


@pytest.mark.parametrize(("right", "is_told"), [(3.9, True), (4.1, False)])
def test_guesses_of_the_last_steps_are_compared_with_one_token(right: float, is_told: bool) -> None:
    """It would be right for 40 %; older steps do not count."""
    last = last_steps((0, 10), *[(right, 10)] * STEPS_LOOKED_AT)
    told = list(verdict(last, None, packed(ROWS), None, TOKENIZER))
    assert bool(told) == is_told
    if is_told:
        assert "in the last steps, the head's first guess is right for 39.0% of" in told[0]
        assert "alone would be for 40.0%" in told[0]


@pytest.mark.parametrize(("ranks", "is_told"), [([0, 1, 0, 0, 9], False), ([0, 1, 1, 0, 9], True)])
def test_held_out_answers_go_before_training_steps(ranks: list[int], is_told: bool) -> None:
    places = [(0, 1)] * len(ranks)
    evaluation = measure(RankedAnchors(torch.tensor(ranks)[:, None], places, list(range(5))))
    told = list(verdict(last_steps((9, 10)), evaluation, packed(ROWS), packed(ROWS), TOKENIZER))
    assert [sentence.startswith("held out") for sentence in told] == [True] * is_told


def test_a_loss_of_exactly_nothing_is_named() -> None:
    told = list(verdict(last_steps((9, 10), loss=0.0), None, packed(ROWS), None, TOKENIZER))
    assert told == [
        "the loss of the last step is exactly 0: the head learns nothing from these rows"
    ]
    assert not list(verdict(LastSteps(), None, packed(ROWS), None, TOKENIZER))
