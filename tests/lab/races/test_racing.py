"""Races with draft models of other tokenizers."""

import logging

import pytest
from tiny import LETTERS, letters_model

from drafthead.core.target.target import Target
from drafthead.lab.races import racing
from drafthead.lab.races.racing import DraftOptions, entrants, run_races
from drafthead.lab.races.record import Prompt, drafts_by_name
from drafthead.lab.races.terms import RaceTerms


def test_a_drafter_whose_folder_has_the_name_of_its_kind_is_named_once() -> None:
    assert [*drafts_by_name(["ngrams:runs/ngrams", "ngrams:mine", "lookup"])] == [
        "ngrams", "ngrams mine", "lookup",
    ]  # fmt: skip


def race_of(target: Target, draft: Target) -> list[str]:
    """The modes that took part in races at temperatures 1 and 0, in which draft models decode."""
    drafts = drafts_by_name(["model:draft"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "load_draft_model", lambda *about: draft)
        racers = entrants(target, drafts, DraftOptions(3, 4, compile=False))
    terms = RaceTerms((1.0, 0.0), max_new_tokens=12, rounds=1)
    rows, _ = run_races(racers, [Prompt([0, 1, 2], None)], terms)
    assert [row.tau >= 1 for row in rows if row.mode == "model draft"] == [True, True]
    return [f"{row.mode} at {row.temperature:g}" for row in rows if "assistant" in row.mode]


def test_a_race_above_temperature_0_leaves_the_draft_model_as_it_is() -> None:
    modes = race_of(letters_model(LETTERS), letters_model(LETTERS[::-1], ("ab", "cd"), seed=1))
    assert modes == [f"generate + assistant{n} at {t}" for t in (1, 0) for n in ("", ", 3")]


@pytest.mark.parametrize(
    ("letters", "left"), [(LETTERS[::-1], []), (LETTERS[:4], ["", ", 3"])], ids=["as many", "fewer"]
)
def test_pairs_that_transformers_cannot_decode_with_are_raced_without_it(
    letters: str, left: list[str], caplog
) -> None:
    """As many tokens: never. Only tokens that the target has as well: not above temperature 0."""
    with caplog.at_level(logging.WARNING):
        modes = race_of(letters_model(LETTERS), letters_model(letters, seed=1))
    assert modes == [f"generate + assistant{n} at 0" for n in left]
    assert "generate + assistant does not take part" in caplog.text
