"""What a row's past offers as its continuation."""

import math

import pytest
import torch
from lookup_texts import past_of

from drafthead.core.drafting.drafter import Committed
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.trees.tree import Budget, Free
from drafthead.infer.drafters.history import MAX_NGRAM, MEMORY, MatchRecord
from drafthead.infer.drafters.lookup import PromptLookup


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("abcdab", 2, "cd"),
        ("abcdab", 7, "cdabcda"),  # in a circle
        ("xabyabzab", 3, "zab"),  # the last occurrence
        ("xabcdyabceabc", 1, "e"),  # of four matches as long as each other
        ("wxabcdyabcwxabc", 1, "d"),  # a longer match goes on
        ("xyzaqyzab", 2, ""),
        ("aaaa", 3, "aaa"),
        ("a", 3, ""),
    ],
)
def test_the_longest_match_decides(text: str, count: int, expected: str) -> None:
    assert "".join(map(chr, past_of(text).continuation(count))) == expected


def test_short_ngrams_may_be_left_out() -> None:
    past = past_of("abcxb")
    assert past.continuation(1) == [ord("c")]
    assert past.continuation(1, least=2) == []
    assert past_of("abcab").continuation(1, least=2) == [ord("c")]


def longest_match(text: str) -> int:
    """The length of the longest end of a text that also occurs earlier in it, found by search."""
    lengths = range(len(text) - 1, 0, -1)
    return next((n for n in lengths if text[-n:] in text[:-1]), 0)


def test_no_match_is_longer_than_the_longest_and_few_are_shorter() -> None:
    text = "the cat sat on the mat and the cat sat on the rug and on the mat sat the cat " * 2
    found = [past_of(text[:end]).matched() for end in range(1, 60)]
    longest = [longest_match(text[:end]) for end in range(1, 60)]
    assert all(a <= b for a, b in zip(found, longest, strict=True))
    assert sum(a == b for a, b in zip(found, longest, strict=True)) >= 55
    assert all(a == b for a, b in zip(found, longest, strict=True) if b <= MAX_NGRAM)


def test_a_match_is_what_it_says() -> None:
    past = past_of("abcabdabcabdab")
    place, length = past.match
    assert past.tokens[-length:] == past.tokens[place - length : place]
    assert past.guess == past.tokens[place] == ord("c")


def test_cutting_a_past_gives_the_match_of_then() -> None:
    text = "abcabcabxabcab"
    for count in range(1, len(text)):
        assert past_of(text).first_tokens(count).match == past_of(text[:count]).match


def test_long_matches_are_believed_more_and_belief_follows_the_text() -> None:
    record = MatchRecord()
    one, three = record.log_chances(2, 3), record.log_chances(20, 3)
    assert one[0] < three[0] and one == sorted(one, reverse=True)
    assert one[1] == pytest.approx(math.log(record.share(2)) + math.log(record.share(3)))
    for _ in range(200):
        record.add(2, was_right=False)
    assert record.share(2) < 0.1
    assert record.share(len(record.seen) + 5) == record.share(len(record.seen))
    assert math.isfinite(MatchRecord().log_chances(1000, 1)[0])


def test_what_follows_matches_is_learnt_from_answers_and_not_from_prompts() -> None:
    lookup = PromptLookup(2)
    session = lookup.start(torch.tensor([[1, 2, 3]]), torch.tensor([3]))
    before = list(lookup.matches.seen)

    def commit(*tokens: int) -> None:
        there = torch.tensor([tokens])
        nothing = Features(None, ())
        session.commit(Committed(there, nothing, torch.tensor([len(tokens)])))

    commit(2, 3, 1, 2)
    assert lookup.matches.seen == before
    commit(3, 9)  # 3 followed 1 2 before, and after 1 2 3 there was no 9
    learnt = [a - b * (1 - 1 / MEMORY) for a, b in zip(lookup.matches.seen, before, strict=True)]
    assert [place for place, gain in enumerate(learnt) if gain > 0.9] == [1, 2]
    assert lookup.matches.share(2) > MatchRecord().share(2)
    assert lookup.matches.share(3) < MatchRecord().share(3)


def test_free_drafts_are_guesses_and_a_smaller_one_is_a_part_of_the_last() -> None:
    session = PromptLookup(4, least=2).start(torch.tensor([[1, 2, 3, 4, 5, 1]]), torch.tensor([6]))
    there = torch.tensor([[2, 3, 4, 5, 1, 2]])
    session.commit(Committed(there, Features(None, ()), torch.tensor([6])))
    large = session.propose(Free(8), SamplingConfig(), None)
    small = session.propose(Free(3), SamplingConfig(), None)
    assert large.tree().tokens.tolist() == [[2, 3, 4, 5, 1]]
    assert small.tree().tokens.tolist() == [[2, 3, 4]]
    assert session.propose(Budget(3, 2), SamplingConfig(), None).tokens.tolist() == [[2, 3, 4]]
