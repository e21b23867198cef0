"""Stored step times: read when they are whole, and never needed."""

import logging
from pathlib import Path

import pytest

from drafthead.heads import disk_cache
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.timing import timing_cache
from drafthead.infer.timing.step_timing import StepSeconds
from drafthead.infer.timing.timing_cache import cache_file, step_seconds
from drafthead.infer.verifiers import verifier_for

DRAFTER, RULE = PromptLookup(2), verifier_for("greedy", 0.0)
SECONDS: StepSeconds = {None: 0.5, **dict.fromkeys(DRAFTER.budgets, 0.75)}
DAMAGED = [
    b"", b"[[null, 0.5], [[2, 1]", b"5", b"[]", b"{}", b"\xff", b"[" * 10**5,
    b"[[null, 0.5], [[2, 1], 0.75]]",  # a budget is missing
    b"[[null, NaN], [[2, 1], 0.75], [[3, 2], 0.75]]",
    b"[[null, 0], [[2, 1], 0.75], [[3, 2], 0.75]]",
    b"[[null, 0.5], [[2, 1], 0.75], [[3, 2], 1" + b"0" * 400 + b"]]",
    b"[[null, 0.5], [[1, 1], 0.75], [[3, 2], 0.75]]",
    b'[[null, 0.5], ["ab", 0.75], [[3, 2], 0.75]]',
]  # fmt: skip


@pytest.fixture
def timed(monkeypatch) -> list[object]:
    """One entry for each timing."""
    timings: list[object] = []

    def time_steps(*models: object) -> StepSeconds:
        timings.append(models)
        return SECONDS

    monkeypatch.setattr(timing_cache, "time_steps", time_steps)
    disk_cache.log_unusable.cache_clear()
    return timings


@pytest.fixture
def file(tmp_path, monkeypatch, target) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_file(target, DRAFTER, 1, RULE)


def test_steps_are_timed_once_and_read_after_that(target, file, timed) -> None:
    for _ in range(2):
        assert step_seconds(target, DRAFTER, 1, RULE) == SECONDS
    assert len(timed) == 1 and file.exists()


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_named_and_written_again(content, target, file, timed, caplog) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert step_seconds(target, DRAFTER, 1, RULE) == SECONDS
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged; steps are timed again"
    ]
    assert len(timed) == 1


def test_an_answer_needs_no_cache(target, timed, tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "regular").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "regular"))
    decoder = Decoder(target, DRAFTER, adaptive=True)
    expected = Decoder(target).generate([[3, 4, 5]], max_new_tokens=8).sequences
    with caplog.at_level(logging.WARNING):
        for prompts in ([[3, 4, 5]], [[3, 4, 5]] * 3):  # their steps are timed separately
            found = decoder.generate(prompts, max_new_tokens=8).sequences
            assert found == expected * len(prompts)
    assert len(timed) == 2
    assert len(caplog.records) == 1 and "Not a directory" in caplog.text
