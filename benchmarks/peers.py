"""Other engines beside ours: `python benchmarks/peers.py --target MODEL --prompts FILE`.

Each contestant of `peers.yaml` is a process of its own, in an environment of its own. All get the
same token ids and take turns, batch by batch, in random order, while the others are stopped; a
batch counts from its prompt to its last token, and of each answer the tokens up to its end. Speeds
are medians over rounds, and speedups medians of the ratios within a round.
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import tokenizer_named, whole_folder
from drafthead.infer.request.prompts import encode_one
from drafthead.infer.timing.machine import describe_machine, describe_versions
from drafthead.train.data.conversations import read_conversations
from workers.protocol import MARK, Job

HERE = Path(__file__).parent


class Peer:
    """A contestant's process."""

    def __init__(self, name: str, command: str):
        """Start it; the models may take minutes to load, see `wait`."""
        self.name = name
        self.process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # see `stop`
        )
        self.version, self.largest_batch = "", 1

    def wait(self) -> None:
        """Until the models are loaded."""
        ready = self._line()
        self.version, self.largest_batch = ready["version"], ready["largest_batch"]
        self._signal(signal.SIGSTOP)

    def answer(self, job: Job) -> dict[str, Any]:
        """The answers to a job and the seconds that they took."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        reply = self._line()
        self._signal(signal.SIGSTOP)  # vLLM's processes spin for a second, in the next one's time
        return reply

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise UserError(f"the process of {self.name} has ended: its last words are above")

    def stop(self) -> None:
        """End the process, and those that it has started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Setting:
    """What one table is about."""

    batch: int
    temperature: float
    top_p: float

    @property
    def title(self) -> str:
        """In words."""
        drawn = f"T = {self.temperature}, top-p {self.top_p}" if self.temperature else "greedy"
        return f"batch {self.batch}, {drawn}"


@dataclass
class Figures:
    """Tokens and seconds of one contestant in one setting, by round."""

    tokens: list[int]
    seconds: list[float]

    def speeds(self) -> list[float]:
        """Tokens per second of each round."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def commands(path: Path, target: str, scratch: Path) -> dict[str, str]:
    """The contestants whose variables are all set; the others are named.

    `scratch` is for what they read in place of a GGUF file.
    """
    found, missing = {}, {}
    given = {"PYTHON": sys.executable, **os.environ}
    for name, command in yaml.safe_load(path.read_text()).items():
        unset = [v for v in re.findall(r"\$(\w+)", command) if v not in given]
        if unset:
            missing[name] = ", ".join(unset)
            continue
        filled = re.sub(r"\$(\w+)", lambda match: given[match[1]], command)
        found[name] = filled
    if missing:
        print("left out:", "; ".join(f"{name} ({why})" for name, why in missing.items()))
    asked = any("{folder}" in command for command in found.values())
    folder = whole_folder(target, scratch) if asked else target
    return {name: each.format(target=target, folder=folder) for name, each in found.items()}


def race(
    peers: list[Peer], prompts: list[list[int]], setting: Setting, rounds: int, tokens: int
) -> dict[str, Figures]:
    """All prompts through all peers that can, `rounds` times, after a batch of each size that does
    not count.
    """
    able = [peer for peer in peers if peer.largest_batch >= setting.batch]
    figures = {peer.name: Figures([0] * rounds, [0.0] * rounds) for peer in able}
    batches = [prompts[i : i + setting.batch] for i in range(0, len(prompts), setting.batch)]
    order = random.Random(0)
    # Our planner times its steps once for each number of rows.
    for batch in {len(batch): batch for batch in batches}.values():
        for peer in able:
            peer.answer(Job(batch, tokens, setting.temperature, setting.top_p, seed=0))
    turns = product(range(rounds), enumerate(batches))
    for number, (index, batch) in tqdm(turns, setting.title, rounds * len(batches), unit="batch"):
        seed = 1 + number * len(batches) + index
        job = Job(batch, tokens, setting.temperature, setting.top_p, seed)
        for peer in order.sample(able, len(able)):
            reply = peer.answer(job)
            figures[peer.name].tokens[number] += sum(map(len, reply["answers"]))
            figures[peer.name].seconds[number] += reply["seconds"]
    return figures


def summary(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Speed of each contestant, and its ratio to the first."""
    first = next(iter(figures.values())).speeds()
    return {
        name: {
            "tokens_per_second": float(f"{median(each.speeds()):.4g}"),
            "speedup": round(
                median(a / b for a, b in zip(each.speeds(), first, strict=True)), 2
            ),
            "tokens": sum(each.tokens),
        }
        for name, each in figures.items()
    }  # fmt: skip


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """One line a contestant."""
    table = Table("contestant", "tokens/s", "speedup", title=title)
    for name, row in rows.items():
        table.add_row(name, f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}")
    Console().print(table)


def main(
    target: Annotated[str, typer.Option(help="Folder or GGUF file of the model.")],
    prompts: Annotated[str, typer.Option(help="JSONL of prompts.")],
    contestants: Annotated[Path, typer.Option(help="Names and commands.")] = HERE / "peers.yaml",
    limit: Annotated[int, typer.Option(help="Prompts, evenly spread over the file.")] = 48,
    tokens: Annotated[int, typer.Option(help="Most new tokens of each.")] = 128,
    batch: Annotated[list[int] | None, typer.Option(help="Repeatable; by default 1 4 16.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Repeatable; by default 0 and 1 (top-p 0.95).")
    ] = None,
    rounds: int = 3,
    output: Path = HERE / "peers.json",
) -> None:
    """Race all contestants and write the figures."""
    tokenizer = tokenizer_named(target)
    conversations = read_conversations(prompts)
    count = min(limit, len(conversations))
    chosen = [conversations[place * len(conversations) // count] for place in range(count)]
    ids = [encode_one(each.messages[:1], tokenizer) for each in chosen]
    found: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as running:
        peers, scratch = [], Path(running.enter_context(TemporaryDirectory()))
        # One after the other: loading takes all processors.
        for name, command in tqdm(commands(contestants, target, scratch).items(), desc="loading"):
            peers.append(Peer(name, command))
            running.callback(peers[-1].stop)
            peers[-1].wait()
        about = {
            "command": shlex.join(["python", *sys.argv]), "machine": describe_machine(),
            "versions": describe_versions() | {peer.name: peer.version for peer in peers},
            "prompts": len(ids), "prompt_tokens": sum(map(len, ids)), "max_new_tokens": tokens,
            "rounds": rounds, "results": found,
        }  # fmt: skip
        for drawn, rows in product(temperature or [0.0, 1.0], batch or [1, 4, 16]):
            setting = Setting(rows, drawn, 0.95 if drawn else 1.0)
            found[setting.title] = summary(race(peers, ids, setting, rounds, tokens))
            print_table(setting.title, found[setting.title])
            write_text(output, json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
