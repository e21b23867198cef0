"""What a run is resumed from: whole states of the same data and the same target."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from tiny import tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.train.data.training_rows import Sources
from drafthead.train.jobs import outputs
from drafthead.train.jobs.outputs import full_disk_named
from drafthead.train.run.folder import Progress, SavedStates, damage, read_progress

SOURCES = Sources("data", "target")


@pytest.fixture
def states(tmp_path: Path) -> SavedStates:
    """Two states of one file each."""
    states = SavedStates(tmp_path / "state")
    for step in (3, 6):
        save(states, step)
    return states


def save(states: SavedStates, step: int) -> None:
    (states.temporary / "part").mkdir(parents=True)
    (states.temporary / "part" / "optimizer.bin").write_bytes(bytes(1000))
    states.keep(Progress(step=step), SOURCES)


def names(states: SavedStates) -> list[str]:
    return [state.name for state in states.newest_first()]


def test_the_newest_states_are_kept(states: SavedStates) -> None:
    save(states, 9)
    assert names(states) == ["step-000000009", "step-000000006"]
    states.drop_old(kept=1)
    assert names(states) == ["step-000000009"]
    assert read_progress(states.newest_whole(), SOURCES) == Progress(step=9)


DAMAGES = {
    "cut": lambda path: path.write_bytes(bytes(10)),
    "changed": lambda path: path.write_bytes(bytes(999) + b"x"),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", ["part/optimizer.bin", "progress.json"])
def test_a_damaged_newest_state_is_named_and_the_older_one_taken(
    states: SavedStates, caplog: pytest.LogCaptureFixture, kind: str, name: str
) -> None:
    newest, older = states.newest_first()
    DAMAGES[kind](newest / name)
    assert states.newest_whole() == older
    assert f"{newest} is damaged ({name}" in caplog.text


def test_without_a_whole_state_there_is_advice(states: SavedStates) -> None:
    for state in states.newest_first():
        shutil.rmtree(state / "part")
    with pytest.raises(UserError, match=r"no state in .* is whole: .*train.overwrite=true"):
        states.newest_whole()


def test_a_state_of_an_older_version_is_taken_as_whole(states: SavedStates) -> None:
    state = states.newest_whole()
    (state / "progress.json").write_text(
        '{"step": 6, "seconds": 1.0, "supervised_tokens": 5, "data": "data"}'
    )
    assert damage(state) is None
    assert read_progress(state, SOURCES) == Progress(6, 1.0, 5)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (Sources("other", "target"), "the training data is no longer"),
        (Sources("data", "other"), "the weights of the target are no longer"),
    ],
)
def test_other_sources_are_refused(states: SavedStates, sources: Sources, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_progress(states.newest_whole(), sources)


def test_weights_have_one_fingerprint_in_every_type_and_another_after_any_training() -> None:
    first = weights_fingerprint(Target(tiny_llama()))
    assert first == weights_fingerprint(Target(tiny_llama()))
    assert first == weights_fingerprint(Target(tiny_llama().bfloat16()))
    for name, parameter in tiny_llama().named_parameters():
        tuned = tiny_llama()
        tuned.get_parameter(name).data += 0.1 * torch.ones_like(parameter)
        assert weights_fingerprint(Target(tuned)) != first, name


FULL = {
    "the system's own error": (OSError(errno.ENOSPC, "No space left on device"), 10**12),
    "a quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), 10**12),
    "a library in Rust": (
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
        10**12,
    ),
    "a library that lost the reason": (RuntimeError("unexpected pos 64 vs 0"), 0),
}


@pytest.mark.parametrize("kind", FULL)
def test_a_full_disk_is_one_sentence(kind: str, tmp_path: Path, monkeypatch) -> None:
    error, free = FULL[kind]
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    expected = pytest.raises(UserError, match=f"the disk of {tmp_path} is full: make room")
    with expected, full_disk_named(tmp_path):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EACCES, "denied")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    with pytest.raises(type(error)), full_disk_named(tmp_path):
        raise error
