"""Everything that only a GPU can tell, in one run: `sh benchmarks/gpu.sh`, at most 25 minutes.

The GPU tests, distillation and training of the demo target's heads, and the engine on the demo
target and on a random Llama of Llama 3's size. The report is one JSON file that is written again
after each stage, so that nothing is lost when a later one fails.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from drafthead.heads.storage.files import write_text
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.train.run.summary import summarize

FAMILIES = ("medusa", "eagle3", "parallel")
TESTERS = "8"  # processes: what takes time is compiling
LINES_KEPT = 30  # of the output of a stage that failed


def distill(run: Path, limit: int) -> list[str]:
    """The command that lets the demo target answer prompts."""
    return [
        *("drafthead", "distill", "--target", "assets/demo_target"),
        *("--prompts", "assets/demo_prompts/train.jsonl", "--output", f"{run}/distilled.jsonl"),
        *("--max-new-tokens", "160", "--batch-size", "256", "--limit", str(limit)),
    ]


def training(run: Path, family: str, minutes: float) -> list[str]:
    """The command that trains a head of a family on these answers."""
    return [
        *("accelerate", "launch", "--num_processes", "1", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *("train/train_heads.py", "--config", f"configs/demo_{family}.yaml"),
        f"data.train={run}/distilled.jsonl",
        "data.validation=null",
        f"train.output={run}/{family}",
        f"train.max_minutes={minutes}",
    ]


class Report:
    """The stages that have ended, in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "stages": {},
        }

    def run(self, name: str, command: Sequence[str], result: Path | None = None) -> bool:
        """Run a stage and record its time; what it wrote to `result` becomes part of the report.

        Returns whether it succeeded.
        """
        print(f"== {name}: {' '.join(command)}", flush=True)
        started = time.perf_counter()
        ended = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        stage: dict[str, Any] = {
            "command": " ".join(command),
            "seconds": time.perf_counter() - started,
            "exit": ended.returncode,
        }
        lines = ended.stdout.splitlines()
        if ended.returncode:
            stage["output"] = lines[-LINES_KEPT:]
        elif result is not None:
            stage["result"] = result_in(result)
        else:
            stage["last line"] = lines[-1] if lines else ""
        print("\n".join(lines[-3:]), flush=True)
        self.content["stages"][name] = stage
        write_text(self.path, json.dumps(self.content, indent=2) + "\n")
        return ended.returncode == 0


def result_in(path: Path) -> Any:
    """A JSON file's content, or the figures of the training run in a folder."""
    return asdict(summarize(path)) if path.is_dir() else json.loads(path.read_text())


def main(
    output: Annotated[Path, typer.Option(help="Folder for gpu.json.")] = Path("benchmarks/gpu"),
    run: Annotated[Path, typer.Option(help="Folder for answers and heads.")] = Path("runs/gpu"),
    large: Annotated[str, typer.Option(help="Size of the random Llama: 91M or 8B.")] = "8B",
    minutes: Annotated[float, typer.Option(help="Training time of each head.")] = 1.0,
    limit: Annotated[int, typer.Option(help="Prompts to answer for training.")] = 1600,
    rounds: Annotated[int, typer.Option(help="Rounds of every comparison.")] = 2,
    tokens: Annotated[int, typer.Option(help="New tokens of every answer.")] = 64,
) -> None:
    """Run all stages; exit 1 if one of them failed."""
    report = Report(output / "gpu.json")
    output.mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--numprocesses", TESTERS, "tests"]
    succeeded = [report.run("tests", tests), report.run("distill", distill(run, limit))]
    for family in FAMILIES:
        command = training(run, family, minutes)
        succeeded.append(report.run(f"train {family}", command, run / family))
    engine = [
        *(sys.executable, "benchmarks/engine.py", "--head", f"{run}/medusa", "--large", large),
        *("--rounds", str(rounds), "--tokens", str(tokens), "--output", str(output)),
    ]
    succeeded.append(report.run("engine", engine, output / "engine.json"))
    print(f"{sum(succeeded)} of {len(succeeded)} stages succeeded: {report.path}")
    raise typer.Exit(0 if all(succeeded) else 1)


if __name__ == "__main__":
    typer.run(main)
