"""What is said of a head that has learnt nothing."""

import pytest
import torch
from runs import in_memory
from tiny import byte_tokenizer

from drafthead.train.data.packing import PackedData, pack_sequences
from drafthead.train.data.sequences import TokenSequence, TokenTable, mixed
from drafthead.train.learning.evaluation import measure, verdict
from drafthead.train.learning.ranks import RankedAnchors

TOKENIZER = byte_tokenizer()


def table(*rows: tuple[str, str]) -> TokenTable:
    """Letters as tokens; the second text of each row is the answer."""

    def ids(text: str) -> list[int]:
        return TOKENIZER(text)["input_ids"]

    return in_memory(
        TokenSequence(
            torch.tensor(ids(asked + answer), dtype=torch.int32),
            torch.tensor([False] * len(asked) + [True] * len(answer)),
        )
        for asked, answer in rows
    )


def packed(rows: TokenTable) -> PackedData:
    return pack_sequences(rows, 64, seed=0)


ROWS = table(("bbb", "abbc"), ("b", "bca"))  # after the first ones: b b c, c a


def test_the_most_frequent_token_follows_another_of_its_answer() -> None:
    token, often, positions = ROWS.most_frequent()
    assert TOKENIZER.decode([token]) in ("b", "c") and (often, positions) == (2, 5)
    twice = mixed([ROWS, table(("c", "ccc"))], [1.0, 2.0], seed=0)
    token, often, positions = twice.most_frequent()
    assert (TOKENIZER.decode([token]), often, positions) == ("c", 6, 9)


@pytest.mark.parametrize(("ranks", "is_told"), [([0, 1, 0, 0, 9], False), ([0, 1, 1, 0, 9], True)])
def test_guesses_are_compared_with_one_token(ranks: list[int], is_told: bool) -> None:
    places = [(0, 1)] * len(ranks)
    evaluation = measure(RankedAnchors(torch.tensor(ranks)[:, None], places, list(range(5))))
    told = list(verdict(1.0, evaluation, packed(ROWS), TOKENIZER))
    assert bool(told) == is_told
    if is_told:
        assert "the head's first guess is right for 40.0% of" in told[0]
        assert "alone would be for 40.0%" in told[0]


def test_a_loss_of_exactly_nothing_is_named() -> None:
    assert list(verdict(0.0, None, None, TOKENIZER)) == [
        "the loss of the last step is exactly 0: the head learns nothing from these rows"
    ]
    assert not list(verdict(1.0, None, None, TOKENIZER))
