"""What is dropped from invented messages, and what near duplicates are."""

import random

import pytest

from drafthead.train.prompts.message_filter import (
    MessageFilter,
    NearDuplicates,
    jaccard,
    repeated_share,
    shingles,
)

PLAIN = "How do I sort a list of dictionaries by one of their keys in Python?"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (PLAIN, None),
        ("Hi there", "fewer than 3 words"),
        ("!? ... \n", "fewer than 3 words"),
        ("Explain the token <|im_start|> to me", "text of a chat template inside"),
        ("Tell me a joke\nAssistant: Why did the hen cross", "text of a chat template inside"),
        ("Tell me about user: names in Linux", None),
        ("Say it in gre\ufffdk letters, please", "broken characters"),
        ("buy now and here " * 6, "repeats itself"),
    ],
)
def test_what_is_dropped(text, problem) -> None:
    assert MessageFilter().problem(text) == problem


def test_messages_like_those_before_are_dropped() -> None:
    judge = MessageFilter()
    assert judge.problem(PLAIN) is None
    assert judge.problem(f"  {PLAIN.upper()}!") == "same as another"
    assert judge.problem(PLAIN.replace("Python", "Ruby")) == "nearly the same as another"
    assert judge.problem("How do I sort a list of words by their lengths in Rust?") is None


def test_repeated_runs_are_counted_as_in_the_example() -> None:
    assert repeated_share(["a", "b", "c", "a", "b", "c"]) == 0.25
    assert repeated_share(["a", "b"]) == 0


def test_similarity_is_that_of_the_sets_of_runs() -> None:
    assert len(shingles("How do I sort a list?")) == 4
    one, other = shingles("a b c d e"), shingles("b c d e f")  # abc bcd cde, bcd cde def
    assert jaccard(one, other) == 0.5
    assert jaccard(shingles("A b"), shingles("a, b")) == 1


def test_the_rarest_runs_find_what_comparing_all_pairs_finds() -> None:
    """Texts of 30 words with a few exchanged, after others that share many words with them."""
    chance = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    before = [" ".join(chance.choices(words[:9], k=30)) for _ in range(30)]
    found = expected = 0
    for _ in range(300):
        text = chance.choices(words, k=30)
        changed = [chance.choice(words) if chance.random() < 0.06 else word for word in text]
        seen = NearDuplicates(0.7)
        assert all(map(seen.add, [*before, " ".join(text)]))
        similar = jaccard(shingles(" ".join(text)), shingles(" ".join(changed))) >= 0.7
        is_new = seen.add(" ".join(changed))
        assert similar or is_new  # candidates are compared exactly: no false alarm
        expected += similar
        found += not is_new
    assert 50 < expected < 250
    assert found == expected
