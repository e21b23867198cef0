"""Whatever writes for long goes on as if nothing had been, after kills and after a full disk.

A writer is killed in a fork of this process, which needs no imports. `pytest -m slow -s
tests/train/test_kills.py` kills two processes that train together thirty times.
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from distilled import SETTINGS, FakeSource, RoundedByBatch, SomeCut, asked, distilled
from forks import forked, status_of
from runs import evaluations, run, write_inputs, write_run

from drafthead.core.errors import UserError
from drafthead.core.storage.row_file import RowFile
from drafthead.train.distillation import answers
from drafthead.train.jobs.outputs import only_writer
from drafthead.train.prompts import invention

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ROOT = Path(__file__).parents[2]
UNFINISHED = 4  # lines at most, of a batch or after the last state
PAUSE = 0.005  # seconds a batch of what makes its answers up
BATCHES = replace(SETTINGS, batch_size=3)
CUT_LEFT_OUT = replace(BATCHES, drop_cut=True, max_new_tokens=8)
# Features of some rows are kept, and a state after every second step.
TRAINING = {"max_steps": 20, "save_every": 2, "eval_every": 5}
FEATURES = {"feature_budget_gb": 30e-6}


@dataclass(frozen=True)
class Writer:
    """What writes one file or folder, from the beginning or from where it was stopped."""

    write: Callable[[Path], object]  # into a folder
    output: str
    lines: str = ""  # the file that grows, where that is not the output
    on_full_disk: tuple[object, str] | None = None  # what then fails, if it is named here
    is_torn: bool = False  # whether a kill within a write, which is seldom, is made of each kill

    def kept(self, folder: Path) -> object:
        """All that a run leaves, but for times."""
        path = folder / self.output
        if path.is_file():
            return path.read_bytes()
        losses = [json.loads(line)["loss"] for line in (path / "metrics.jsonl").open()]
        return losses, evaluations(path), (path / "model.safetensors").read_bytes()

    def progress(self, folder: Path) -> int:
        """How many lines there are."""
        path = folder / (self.lines or self.output)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def held(self, folder: Path) -> AbstractContextManager[object]:
        """The output, as another writer has it."""
        path = folder / self.output
        return closing(RowFile(path, alone=True)) if path.suffix else only_writer(path)


def training(family: str, on_full_disk: tuple[object, str] | None = None) -> Writer:
    """A run of a family; the inputs lie beside the folder."""

    def write(folder: Path) -> Path:
        inputs, head = folder.parent / "inputs", {"family": family}
        if not inputs.exists():
            write_inputs(inputs, initializer_range=0.02)
        config = write_run(folder / "run.yaml", inputs, head, {}, TRAINING)
        settings = yaml.safe_load(config.read_text())
        settings["data"] |= FEATURES | {"feature_folder": str(folder / "features")}
        config.write_text(yaml.safe_dump(settings))
        return run(config)

    return Writer(write, "run", "run/metrics.jsonl", on_full_disk)


def distilling(decoder: type, settings: object) -> Writer:
    """Answers of a decoder that makes them up."""

    def write(folder: Path) -> object:
        made = decoder(delay=PAUSE)
        return distilled(made, asked(60), folder / "answers.jsonl", settings)

    return Writer(write, "answers.jsonl", is_torn=True)


def invented(folder: Path) -> object:
    """Prompts of a target that makes them up."""
    return invention.invent(FakeSource(delay=PAUSE), folder / "prompts.jsonl", 60)


WRITERS = {
    "answers that depend on their batch": distilling(RoundedByBatch, BATCHES),
    "cut answers that are left out": distilling(SomeCut, CUT_LEFT_OUT),
    "invented prompts": Writer(invented, "prompts.jsonl", "", (invention, "row_of")),
    "a head": training("medusa", (torch, "save")),
    "a draft model": training("draft_model"),
}


@pytest.fixture(autouse=True)
def one_batch_in_a_window(monkeypatch) -> None:
    """Batches are answered one after the other, so that the same ones come again."""
    monkeypatch.setattr(answers, "WINDOW", 1)


def ended(child: int) -> bool:
    """Whether a process has ended by itself."""
    return os.waitpid(child, os.WNOHANG) != (0, 0)


def killed_after_some_lines(writer: Writer, folder: Path, pause: float) -> bool:
    """One life, until a moment after its first new line; whether it ended before."""
    before = writer.progress(folder)
    child, _ = forked(lambda: writer.write(folder))
    deadline = time.monotonic() + 60
    while (lines := writer.progress(folder)) <= before:
        if ended(child):
            return True
        assert lines >= before - UNFINISHED, "what was finished is kept"
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.001)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    return status_of(child) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], object]:
    """What a writer leaves that nothing has stopped, by its name."""

    @cache
    def of(name: str) -> object:
        folder = tmp_path_factory.mktemp("whole") / "folder"
        folder.mkdir()
        WRITERS[name].write(folder)
        return WRITERS[name].kept(folder)

    return of


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_killed_is_written_as_if_nothing_had_been(
    name: str, whole: Callable[[str], object], tmp_path: Path
) -> None:
    writer, moments = WRITERS[name], random.Random(0)
    expected, killed = whole(name), tmp_path / "killed"
    killed.mkdir()
    found: list[int] = []
    while len(found) < 4 and not killed_after_some_lines(writer, killed, moments.uniform(0, 0.02)):
        found.append(writer.progress(killed))
        if writer.is_torn:
            path = killed / writer.output
            path.write_bytes(path.read_bytes()[:-20])
    assert len(found) >= 2, "it has to be killed in its midst"
    writer.write(killed)
    assert writer.kept(killed) == expected


@pytest.mark.parametrize("name", [name for name, each in WRITERS.items() if each.on_full_disk])
def test_a_full_disk_is_named_and_the_next_run_goes_on(
    name: str, whole: Callable[[str], object], tmp_path: Path, monkeypatch
) -> None:
    """The disk is full once three lines are there."""
    writer = WRITERS[name]
    assert writer.on_full_disk is not None
    expected, full = whole(name), tmp_path / "full"
    full.mkdir()
    module, function = writer.on_full_disk
    usual = getattr(module, function)

    def no_space(*given: object, **options: object) -> object:
        if writer.progress(full) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, no_space)
        with pytest.raises(UserError, match=rf"the disk of .*{writer.output} is full: make room"):
            writer.write(full)
    writer.write(full)
    assert writer.kept(full) == expected


@pytest.mark.parametrize("name", WRITERS)
def test_a_second_writer_is_refused_while_the_first_one_writes(name: str, tmp_path: Path) -> None:
    writer = WRITERS[name]
    with (
        writer.held(tmp_path),
        pytest.raises(UserError, match=rf"another process is writing .*{writer.output}: wait"),
    ):
        writer.write(tmp_path)
    assert writer.progress(tmp_path) == 0


KILLS = 30


def lines_of(path: Path) -> int:
    """How many there are; the file may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def launched(config: Path) -> subprocess.Popen[str]:
    """Two processes that train together."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"),
        *("--config_file", str(ROOT / "configs/accelerate/cpu2.yaml")),
        *(str(ROOT / "train/train_heads.py"), "--config", str(config)),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has started: the launcher's are in sessions of their own."""
    parent = psutil.Process(process.pid)
    for one in (parent, *parent.children(recursive=True)):
        one.kill()
    process.communicate()


@pytest.mark.slow
def test_two_processes_that_are_killed_thirty_times_repeat_every_loss(tmp_path: Path) -> None:
    """Every third life may end before the first line of that life, the others end after it."""
    write_inputs(tmp_path, initializer_range=0.02)
    settings = {"max_steps": 600, "save_every": 2}
    whole, killed = (
        write_run(tmp_path / f"{name}.yaml", tmp_path, {"family": "medusa"},
                  {"name": "adamw", "lr": 3e-3}, settings)
        for name in ("whole", "killed")
    )  # fmt: skip
    _, errors = launched(whole).communicate(timeout=1800)
    log, moments, found = tmp_path / "killed/metrics.jsonl", random.Random(0), list[int]()
    while len(found) < KILLS:
        begun, lines, process = time.monotonic(), lines_of(log), launched(killed)
        for_work = len(found) % 3 > 0
        while for_work and lines_of(log) <= lines:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        needed = time.monotonic() - begun
        time.sleep(moments.uniform(0, 0.5 if for_work else max(4.0, needed)))
        assert process.poll() is None, f"it ended by itself after {len(found)} kills"
        kill_all(process)
        found.append(lines_of(log))
    _, errors = launched(killed).communicate(timeout=1800)
    logs = [(tmp_path / name / "metrics.jsonl").open() for name in ("whole", "killed")]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    furthest = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"\n{KILLS} kills after {found} steps, losses {furthest:.1e} apart")
    assert len(losses[1]) == 600 and furthest <= 1e-6, errors
