"""What a row's past offers as its continuation."""

import pytest

from drafthead.infer.drafters.past import Past


def past_of(text: str) -> Past:
    """One token a letter."""
    first, *others = map(ord, text)
    past = Past(first)
    for token in others:
        past.append(token)
    return past


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("abcdab", 2, "cd"),
        ("abcdab", 7, "cdabcda"),  # in a circle
        ("xabyabzab", 3, "zab"),  # the last occurrence
        ("xyzaqyzab", 2, ""),
        ("aaaa", 3, "aaa"),
        ("a", 3, ""),
    ],
)
def test_the_longest_ngram_decides(text: str, count: int, expected: str) -> None:
    assert "".join(map(chr, past_of(text).continuation(count))) == expected


def test_short_ngrams_may_be_left_out() -> None:
    past = past_of("abcxb")
    assert past.continuation(1) == [ord("c")]
    assert past.continuation(1, least=2) == []
    assert past_of("abcab").continuation(1, least=2) == [ord("c")]
