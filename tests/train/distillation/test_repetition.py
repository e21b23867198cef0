"""When an answer counts as a repetition of itself."""

import pytest
import torch

from drafthead.train.distillation.answer_source import EVERY, TIMES, WINDOW, EndlessRepetition

TEXT = list(range(1000, 1000 + 4 * WINDOW))


def ends(tokens: list[int]) -> bool:
    """Asked after every token, as decoding does."""
    ask = EndlessRepetition()
    return any(bool(ask(torch.tensor([tokens[:n]]), None)) for n in range(1, len(tokens) + 1))


@pytest.mark.parametrize("period", [1, 2, 7, WINDOW - 1, WINDOW, 50])
def test_a_loop_ends_whatever_its_length(period: int) -> None:
    loop = TEXT[:period] * (TIMES + 1) * (1 + WINDOW // period)
    assert ends(TEXT[-20:] + loop)


def test_text_without_a_loop_goes_on() -> None:
    assert not ends(TEXT)
    assert not ends([token for token in TEXT for _ in range(WINDOW // 2)])


def test_one_quotation_is_no_loop_and_two_are() -> None:
    quoted = TEXT[: WINDOW + EVERY]
    others = TEXT[2 * WINDOW :]
    assert not ends(quoted + others[:20] + quoted + others[20:])
    assert ends(quoted + others[:20] + quoted + others[20:40] + quoted)


def test_rows_are_told_apart() -> None:
    length = 4 * WINDOW
    rows = torch.tensor([TEXT[:length], [5] * length])
    assert EndlessRepetition()(rows, None).tolist() == [False, True]
