"""One round of beam search on worked examples."""

from dataclasses import replace

import pytest
import torch

from drafthead.infer.beams.beam_round import (
    NEVER,
    BeamRules,
    Beams,
    Extensions,
    best_extensions,
    candidates_of,
    next_round,
)

A, B, C, STOP = 0, 1, 2, 3
RULES = BeamRules(2, 1.0, False, frozenset({STOP}), limit=9)
# Two beams, "a" and "b", after one round.
BEGUN = replace(Beams.first(2), running=[(A,), (B,)], scores=torch.tensor([-1.0, -2.0]))


def candidates(*found: tuple[int, int, float]) -> Extensions:
    """Of (beam, token, score) each."""
    parents, tokens, scores = zip(*found, strict=True)
    return Extensions(torch.tensor(scores), parents, tokens)


def test_the_best_extensions_are_the_best_sums_over_all_beams() -> None:
    log_probs = torch.tensor([[[-1.5, -2.0, -9.0, -0.5], [-8.0, -7.0, -0.25, -2.0]]])
    table = best_extensions(log_probs, BEGUN.scores[None], count=4)
    found = candidates_of(table[0].tolist(), vocab_size=4)
    assert found.scores.tolist() == [-1.5, -2.25, -2.5, -3.0]
    assert [*zip(found.parents, found.tokens, strict=True)] == [(0, STOP), (1, C), (0, A), (0, B)]


def test_ended_candidates_become_answers_and_the_best_others_go_on() -> None:
    found = candidates((0, STOP, -1.5), (1, C, -2.5), (0, C, -3.0), (1, STOP, -4.0))
    after, parents = next_round(BEGUN, found, RULES)
    assert after.running == [(B, C), (A, C)] and parents == [1, 0]
    assert after.scores.tolist() == [-2.5, -3.0]
    assert after.ended[0] == (A, STOP), "b and the end is not among the two best candidates"
    assert after.has_ended.tolist() == [True, False]
    assert after.ended_scores[0] == -1.5 / 2 and after.ended_scores[1] < NEVER / 2
    assert not after.over


def test_in_the_first_round_only_one_of_the_equal_beams_is_extended() -> None:
    log_probs = torch.tensor([-3.0, -1.0, -2.0, -5.0]).expand(1, 2, 4)
    table = best_extensions(log_probs, Beams.first(2).scores[None], count=4)
    found = candidates_of(table[0].tolist(), vocab_size=4)
    assert found.parents == (0, 0, 0, 0) and found.tokens == (B, C, A, STOP)


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "over"),
    [
        (True, 2.0, True),  # there are two answers
        (False, 1.0, True),  # the best beam, ended now, would have -1.5 / 2, and -0.7 is the worst
        (False, 2.0, False),  # it would have -1.5 / 4
        ("never", 1.0, False),  # ended at the limit it might have -1.5 / 9
        ("never", 0.0, True),  # at any length -1.5, and -1.2 is the worst
    ],
)
def test_a_search_is_over_by_the_rule_of_early_stopping(early_stopping, penalty, over) -> None:
    rules = replace(RULES, early_stopping=early_stopping, length_penalty=penalty)
    begun = replace(
        BEGUN,
        ended=[(STOP,), ()],
        ended_scores=torch.tensor([-0.7, NEVER]),
        has_ended=torch.tensor([True, False]),
    )
    # The second answer has the score -1.2, -0.6 or -0.3 with a penalty of 0, 1 or 2.
    found = candidates((0, STOP, -1.2), (1, C, -1.5), (0, C, -3.0), (1, A, -4.0))
    after, _ = next_round(begun, found, rules)
    assert after.has_ended.all()
    assert after.over is over


def test_at_the_limit_every_candidate_ends() -> None:
    rules = replace(RULES, limit=2)
    found = candidates((1, C, -2.5), (0, C, -3.0), (0, STOP, -3.5), (1, STOP, -4.0))
    after, _ = next_round(BEGUN, found, rules)
    assert after.over and after.ended == [(B, C), (A, C)]
    assert after.ended_scores.tolist() == [-1.25, -1.5]


def test_each_end_token_makes_room_for_as_many_candidates_as_there_are_beams() -> None:
    assert [replace(RULES, end_ids=frozenset(range(ends))).num_candidates for ends in range(4)] == [
        4,
        4,
        6,
        8,
    ]
