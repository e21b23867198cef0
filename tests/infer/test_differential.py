"""Random small configurations decode as `model.generate` and plain decoding do.

`python tests/differential.py --seed N` repeats the case of one seed; see there.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from architectures import ARCHITECTURES, OTHERS
from case_answers import Built, answer_of, is_near_tie
from case_checks import CHECKS
from cases import COLD, WARM, WAYS, Case, drawn
from differential import Tally, mismatches, shortest
from drafters import SMALL_MODELS
from steady import steady_clock
from tiny import ENCODER_DECODERS

from drafthead.heads.base import HEADS
from drafthead.infer.verifiers import VERIFIERS

FEW, PIECE, PIECES = 20, 200, 15  # seeds
MOST_NEAR_TIES = 2  # of a piece


@pytest.fixture(autouse=True)
def steady(tmp_path) -> Iterator[None]:
    """The planner's trees depend on nothing but the seed."""
    with steady_clock(tmp_path):
        yield


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(PIECE * n, marks=pytest.mark.slow) for n in range(1, PIECES + 1))]
)
def test_random_cases_are_decoded_as_by_the_target_alone(first: int) -> None:
    tally = Tally()
    seeds = range(first, first + (PIECE if first else FEW))
    lines = [line for seed in seeds for line in tally.run(seed)]
    print(tally)
    assert not tally.outcomes["mismatch"], "\n".join(lines)
    assert tally.outcomes["near-tie"] <= MOST_NEAR_TIES, "\n".join(lines)


def test_cases_are_of_everything_that_decodes() -> None:
    found = [drawn(seed) for seed in range(3000)]
    assert found[7] == drawn(7)
    assert {case.way for case in found} == {*WAYS} == {*CHECKS}
    assert {case.architecture for case in found} == {*ARCHITECTURES, *OTHERS, *ENCODER_DECODERS}
    assert {case.rule for case in found} == {*COLD, *WARM} >= {*VERIFIERS}
    names = {case.drafter.partition("+")[0].partition(":")[0] for case in found}
    assert names >= {*HEADS, *SMALL_MODELS, "none", "prompt-lookup", "ngrams", "answers"}


def test_a_planted_fault_is_found_and_cut_to_its_shortest_case(monkeypatch) -> None:
    case = Case(
        3, drafter="draft-model+lookup", ends=(5,), processors={"repetition_penalty": 1.2},
        text="bytes", prompts=((9, 10, 11), (12, 13)),
    )  # fmt: skip
    assert mismatches(case) == []
    # Every node passes, whatever the target thinks of it.
    monkeypatch.setattr(
        "drafthead.infer.verifiers.base.at_parents", lambda tree, table: tree.tokens
    )
    found = shortest(case, end=time.monotonic() + 600)
    assert found == Case(3, drafter=found.drafter, prompts=found.prompts, new=found.new)
    assert found.drafter != "none" and found.new < case.new and len(found.prompts[0]) == 1


def test_a_near_tie_is_one_of_logits_that_are_all_but_equal() -> None:
    case = Case(0, way="chat")  # whose target is its own
    built, prompt = Built(case), [9, 10]
    [token, *_] = answer_of(case, built, prompt, 0)
    weight = built.model.get_output_embeddings().weight.data
    twin, other = (token + 1) % case.vocab, (token + 2) % case.vocab
    weight[twin] = weight[token] * (1 + 1e-7)
    assert is_near_tie(case, built, prompt, 0, [token], [twin])
    assert not is_near_tie(case, built, prompt, 0, [token], [other])
    assert not is_near_tie(case, built, prompt, 0, [token, 3], [token])
    warm = replace(case, temperature=1.0)
    [drawn_token, *_] = answer_of(warm, built, prompt, 5)
    for number in range(1, case.vocab, 8):
        away = (drawn_token + number) % case.vocab
        assert not is_near_tie(warm, built, prompt, 5, [drawn_token], [away])
