"""`drafthead train --plan` as a user meets it: tables, JSON, refusals, and a run beside it."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from runs import write_inputs, write_run

from drafthead.core.errors import UserError
from drafthead.lab import planned_training
from drafthead.lab.planned_training import Trial


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_inputs(tmp_path, initializer_range=0.02)
    head = {"family": "eagle3", "depth": 3, "ttt_steps": 2}
    return write_run(tmp_path / "run.yaml", tmp_path, head, {}, {"max_steps": 3})


@pytest.fixture
def plan(config: Path, tmp_path: Path, drafthead):
    """The verb in this process: status, output, errors, and the JSON file if it was written."""

    def plan(*arguments: str) -> tuple[int, str, str, dict]:
        file = tmp_path / "plan.json"
        words = ("train", "--plan", "--config", config, "--output", file, *arguments)
        printed = drafthead(*words)
        return *printed, json.loads(file.read_text()) if file.exists() else {}

    return plan


def test_a_plan_adds_up_and_writes_nothing_of_the_run(plan, config: Path) -> None:
    status, out, _, record = plan("--no-measure")
    assert status == 0 and "it may fit: the run needs at least" in out and "not measured" in out
    memory = record["memory"]
    assert sum(memory["held"].values()) == memory["computed"] == memory["needed"]
    assert memory["held"]["Python and libraries"] > 10**8 and memory["fits"]
    assert not config.with_suffix("").exists()


def test_a_run_that_does_not_fit_is_told_what_to_change(plan) -> None:
    status, out, _, record = plan("--no-measure", "--memory", "1kB")
    assert status == 0 and "it does not fit" in out and not record["memory"]["fits"]
    assert "what needs less: train.micro_batch_rows=1, " in out


def test_time_follows_from_the_trial(plan, monkeypatch) -> None:
    trial = Trial(3, rows=4, tokens=200, seconds=2.0, target_seconds=1.0, peak=3 * 10**8)
    monkeypatch.setattr(planned_training, "run_trial", lambda *_: trial)
    status, out, _, record = plan("--tokens", "720000", "--devices", "2")
    assert status == 0 and "this device's speed times 2, an upper bound, untested" in out
    memory, rows = record["memory"], {row[0]: row[1] for row in record["speed"]["rows"]}
    exchanged = memory["held"]["gradients that processes exchange"]
    assert memory["needed"] == 2 * (3 * 10**8 + exchanged)
    assert rows["supervised tokens"] == "200" and rows["7.2e+05 tokens"] == "1.00"
    status, out, _, record = plan()
    assert record["memory"]["needed"] == record["memory"]["measured"] == 3 * 10**8
    assert "it fits: the run needs about 0.30 GB" in out


def test_a_trial_that_fails_is_reported_and_the_plan_stands(plan, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise UserError("cannot load the model")

    monkeypatch.setattr(planned_training, "run_trial", fails)
    status, out, _, record = plan()
    assert status == 0 and "the speed was not measured: cannot load the model" in out
    assert record["not_tried"] == "cannot load the model" and record["memory"]["fits"]


@pytest.mark.parametrize(
    ("ends", "is_memory"),
    [
        ("import torch; raise torch.OutOfMemoryError('CUDA out of memory')", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("sys.exit('cannot load the model')", False),
    ],
)
def test_a_trial_says_whether_the_memory_was_short(monkeypatch, ends: str, is_memory: bool) -> None:
    run = subprocess.run
    program = f"import os, signal, sys; {ends}"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: run([command[0], "-c", program], **how)
    )
    with pytest.raises(UserError, match="the trial failed") as found:
        planned_training.run_trial(Path("run.yaml"), [])
    assert isinstance(found.value, planned_training.TrialOutOfMemoryError) == is_memory


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--memory", "plenty"), "--memory must be a size such as 80GB"),
        (("--memory", "0GB"), "--memory must be a size"),
        (("--tokens", "-3"), "--tokens must be above 0"),
        (("--devices", "0"), "--devices must be at least 1"),
        (("--devices", "3"), "use a multiple of 3"),
        (("train.micro_batch_row=1",), "did you mean train.micro_batch_rows"),
        (("target.name=./nowhere",), "this folder does not exist"),
        (("data.train=nowhere.jsonl",), "nowhere.jsonl"),
        (("data.max_length=4000",), "has 128 positions"),
    ],
)
def test_bad_input_ends_with_one_sentence(plan, arguments: tuple[str, ...], named: str) -> None:
    status, _, err, record = plan("--no-measure", *arguments)
    assert status == 2 and named in err.splitlines()[-1] and not record


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("64 GiB", 2.0**36), ("1.5g", 1.5e9), ("700", 700)]
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert planned_training.bytes_of(text) == size


@pytest.mark.slow
def test_the_memory_is_within_15_percent_of_a_run(config: Path, tmp_path: Path) -> None:
    def drafthead(*words: str) -> int:
        command = [sys.executable, "-m", "drafthead.scripts.cli", *words, "--config", str(config)]
        subprocess.run(command, check=True)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024

    peak = drafthead("train")
    drafthead("train", "--plan", "--output", str(tmp_path / "plan.json"))
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert abs(memory["measured"] / peak - 1) < 0.15 and memory["computed"] < peak
