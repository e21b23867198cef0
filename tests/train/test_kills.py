"""Thirty kills at random moments, of distillation and of training by two processes.

Slow: each life of a job begins with half a minute of imports. `pytest -m slow -s
tests/train/test_kills.py` prints what was seen.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from runs import write_inputs, write_run
from safetensors.torch import load_file
from tiny import write_conversations, write_target

ROOT = Path(__file__).parents[2]
KILLS = 30
pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


@dataclass
class Job:
    """A command that is killed with all its processes, and started again."""

    command: list[str]
    progress: Callable[[], int]  # lines that it has written so far
    seed: int = 0

    def start(self) -> subprocess.Popen[str]:
        """One life."""
        return subprocess.Popen(
            self.command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def to_the_end(self) -> None:
        """Let it finish."""
        process = self.start()
        _, errors = process.communicate(timeout=1800)
        assert process.returncode == 0, errors

    def killed_often(self) -> list[int]:
        """Kill it at random moments; gives the lines that were there after each kill.

        Every third life may end before the first line of that life is written, the others end
        after it.
        """
        moments, found = random.Random(self.seed), []
        while len(found) < KILLS:
            begun, lines, process = time.monotonic(), self.progress(), self.start()
            wait_for_work = len(found) % 3 > 0
            while wait_for_work and self.progress() <= lines:
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.01)
            needed = time.monotonic() - begun
            time.sleep(moments.uniform(0, 0.5 if wait_for_work else max(4.0, needed)))
            assert process.poll() is None, f"it ended by itself after {len(found)} kills"
            kill_all(process)
            found.append(self.progress())
        return found


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has started: the launcher's are in sessions of their own."""
    parent = psutil.Process(process.pid)
    for one in (parent, *parent.children(recursive=True)):
        one.kill()
    process.communicate()


def lines_of(path: Path) -> Callable[[], int]:
    """Counts the lines of a file that may not be there yet."""
    return lambda: path.read_bytes().count(b"\n") if path.exists() else 0


def test_distillation_killed_thirty_times_writes_the_same_file(tmp_path: Path) -> None:
    write_target(tmp_path / "target", max_position_embeddings=128)
    write_conversations(tmp_path / "prompts.jsonl", 1500, seed=0)

    def job(output: Path) -> Job:
        command = [
            *(sys.executable, "-m", "drafthead.scripts.cli", "distill"),
            *("--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl")),
            *("--output", str(output), "--max-new-tokens", "24", "--batch-size", "1"),
            *("--temperature", "1", "--dtype", "float32"),
        ]
        return Job(command, lines_of(output))

    whole, killed = job(tmp_path / "whole.jsonl"), job(tmp_path / "killed.jsonl")
    whole.to_the_end()
    rows = killed.killed_often()
    killed.to_the_end()
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert rows == sorted(rows)  # no kill and no start takes a row away
    print(f"\ndistillation: {KILLS} kills after {rows} rows, the same file")


@pytest.mark.parametrize(
    ("engine", "precision"),
    [("cpu2", "no"), pytest.param("zero2", "bf16", marks=needs_deepspeed)],
)
def test_training_killed_thirty_times_repeats_every_loss(
    engine: str, precision: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path, initializer_range=0.02)

    def job(name: str) -> Job:
        config = write_run(
            tmp_path / f"{name}.yaml", tmp_path, {"family": "medusa"},
            {"name": "adamw", "lr": 3e-3},
            {"max_steps": 600, "save_every": 2, "mixed_precision": precision},
        )  # fmt: skip
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"),
            *("--config_file", str(ROOT / "configs/accelerate" / f"{engine}.yaml")),
            *(str(ROOT / "train/train_heads.py"), "--config", str(config)),
        ]
        return Job(command, lines_of(tmp_path / name / "metrics.jsonl"))

    whole, killed = job("whole"), job("killed")
    whole.to_the_end()
    steps = killed.killed_often()
    killed.to_the_end()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("whole", "killed")
    ]
    assert len(losses[1]) == 600
    furthest = max(abs(a - b) for a, b in zip(*losses, strict=True))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    apart = max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0])
    print(f"\n{engine}: {KILLS} kills after {steps} steps, losses {furthest:.1e}, "
          f"weights {apart:.1e} apart")  # fmt: skip
    assert furthest <= 1e-6 and apart <= 1e-6
