"""`drafthead train --plan`: real steps, what they took, and the time of the run that follows."""

import subprocess
from pathlib import Path

import pytest
from runs import write_inputs, write_run

from drafthead.core.errors import UserError
from drafthead.lab import trial
from drafthead.lab.trial import Trial, TrialOutOfMemoryError, run_trial, tried
from drafthead.train.run.config import load_run_config

MEASURED = Trial(
    steps=3, rows=4, tokens=200, seconds=2.0, target_seconds=1.0, peak=3 * 10**8, memory=10**9,
    rows_there=10, tokens_there=1000,
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_inputs(tmp_path, initializer_range=0.02)
    head = {"family": "eagle3", "depth": 3, "ttt_steps": 2}
    return write_run(tmp_path / "run.yaml", tmp_path, head, {}, {"max_steps": 3})


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_trial_is_of_the_runs_own_steps_and_keeps_nothing(config: Path) -> None:
    found = tried(load_run_config(config))
    assert (found.steps, found.rows) == (trial.MOST_STEPS, 4)
    assert 0 < found.tokens < 5 * found.tokens_there and 0 < found.target_seconds < found.seconds
    assert 10**8 < found.peak < found.memory and found.rows_there > 4
    assert not config.with_suffix("").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), "reads 1,200 supervised tokens in 12 s, 1.2 times the data"),
        (("train.epochs=2",), "reads 2,000 supervised tokens in 20 s, 2.0 times the data"),
        (("train.max_minutes=1",), "reads 6,000 supervised tokens in 60 s, 6.0 times the data"),
        (
            ("train.max_minutes=1", "data.feature_folder=kept"),
            "reads 12,000 supervised tokens in 60 s, 12.0 times the data",
        ),
    ],
)
def test_the_time_of_a_run_follows_from_its_trial(
    config, monkeypatch, drafthead, settings, expected
):
    monkeypatch.setattr(trial, "run_trial", lambda *_: MEASURED)
    status, out, _ = drafthead("train", "--plan", "--config", str(config), *settings)
    assert status == 0 and expected in out
    assert "100 supervised tokens/s in 3 steps of 4 rows, 50% of the time for the target" in out
    assert "0.30 GB of memory at the peak, of 1.00 GB" in out


@pytest.mark.parametrize(
    ("ends", "is_memory"),
    [
        ("class OutOfMemoryError(Exception): ...\nraise OutOfMemoryError('CUDA')", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("import torch\ntorch.empty(2**60)", True),
        ("sys.exit('cannot load the model')", False),
    ],
)
def test_a_trial_says_whether_the_memory_was_short(monkeypatch, ends: str, is_memory: bool) -> None:
    run, program = subprocess.run, f"import os, signal, sys\n{ends}"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: run([command[0], "-c", program], **how)
    )
    with pytest.raises(UserError, match="the trial failed") as found:
        run_trial(Path("run.yaml"), [])
    assert isinstance(found.value, TrialOutOfMemoryError) == is_memory
    assert ("lower train.micro_batch_rows" in str(found.value)) == is_memory
