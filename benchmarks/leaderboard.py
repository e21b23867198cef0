"""Trains several heads for the same time on the same data, then races them.

    python benchmarks/leaderboard.py --config configs/leaderboard_demo.yaml train.minutes=2

A loop over `drafthead train` and `drafthead compare`. Each race is a folder of the output; the
tables of all are in `leaderboard.md`, the figures in `leaderboard.json`. After a stop or a failure
the same command continues: what is trained or raced already is kept.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import load_decoder_only
from drafthead.heads.base import head_family
from drafthead.heads.formats.files import read_json
from drafthead.lab.reports.report import Table, number
from drafthead.train.data.conversations import read_conversations
from drafthead.train.features.reading import check_row_length
from drafthead.train.run.config import (
    Given,
    RunConfig,
    build_section,
    check_names,
    load_run_config,
    read_override,
    read_yaml,
    written_override,
)
from drafthead.train.run.folder import RunSummary, summarize

RESULT = "comparison.json"  # of a race
STOPPED = 130  # exit status of a verb that was stopped
# Settings that an entry may not have: they are the same for all.
SHARED = ("train.max_minutes", "train.max_steps", "train.epochs", "train.output", "target.name")
TRAINING_COLUMNS = (
    "entry", "family", "parameters", "steps", "seconds", "tokens seen", "tokens/s",
    "in the target", "tau: chain", "16 nodes", "32 nodes",
)  # fmt: skip
RACE_COLUMNS = ("entry", "nodes", "tokens/s", "speedup", "over generate", "tau", "c")
RACE_FIELDS = ("tree_nodes", "tokens_per_second", "speedup", "speedup_hf", "tau", "draft_cost")


@dataclass(frozen=True)
class BoardTarget:
    """The model that drafts are made for; `dtype` is used in the race, training has its own."""

    name: str
    dtype: str = "auto"


@dataclass(frozen=True)
class BoardData:
    """The data of every entry, unless its own settings override it."""

    train: str
    validation: str


@dataclass(frozen=True)
class BoardTraining:
    """The duration of each training, and the folder of heads and results."""

    output: str
    minutes: float = 6.0

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")


@dataclass(frozen=True)
class BoardRace:
    """Options of `drafthead compare`; there is a race for each size of trees."""

    prompts: str
    draft_model: str | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    limit: int = 20  # prompts
    max_new_tokens: int = 128
    rounds: int = 3
    tree_nodes: tuple[int | Literal["planned"], ...] = ("planned",)  # the root included
    seed: int = 0


@dataclass(frozen=True)
class EntryConfig:
    """One head: a training file and settings that override it."""

    config: str
    overrides: tuple[str, ...] = ()
    baseline: str | None = None  # the entry from which this one differs in one thing


@dataclass(frozen=True)
class Entry:
    """An entry with the words of its `drafthead train`, and what these come to."""

    name: str
    words: tuple[str, ...]
    run: RunConfig
    baseline: str | None


@dataclass(frozen=True)
class Board:
    """A whole leaderboard."""

    target: BoardTarget
    data: BoardData
    train: BoardTraining
    race: BoardRace
    entries: tuple[Entry, ...]

    def races(self) -> dict[str, list[str]]:
        """Name of each race (`race-planned`) -> the words of its `drafthead compare`."""
        race, found = self.race, {}
        for size in race.tree_nodes:
            name = f"race-{size}"
            words = ["compare", "--target", self.target.name, "--dtype", self.target.dtype]
            words += ["--prompts", race.prompts, "--output", str(Path(self.train.output, name))]
            words += [f"--{option}={value}" for option, value in (
                ("limit", race.limit), ("max-new-tokens", race.max_new_tokens),
                ("rounds", race.rounds), ("seed", race.seed),
                *(("temperature", temperature) for temperature in race.temperatures),
                *(("draft", entry.run.train.output) for entry in self.entries),
            )]  # fmt: skip
            words += ["--draft", race.draft_model] if race.draft_model else []
            words += [] if size == "planned" else [f"--tree-nodes={size}"]
            found[name] = words
        return found


def load_board(path: Path, overrides: Iterable[str] = ()) -> Board:
    """Read a leaderboard's file and apply overrides such as `train.minutes=2`.

    Raises UserError that names the file or the override and the setting, also for errors in the
    training files that it names.
    """
    given = read_yaml(path)
    for override in overrides:
        given.update(read_override(override))
    listed = {
        name.removeprefix("entries."): given.pop(name)
        for name in list(given)
        if name.startswith("entries.")
    }
    if not listed:
        raise UserError(f"{path} lists no heads under entries:")
    sections = {
        "target": BoardTarget, "data": BoardData, "train": BoardTraining, "race": BoardRace,
    }  # fmt: skip
    check_names(given, sections)
    board = Board(
        **{name: build_section(name, cls, given, path) for name, cls in sections.items()},
        entries=(),
    )
    if board.race.prompts in (board.data.train, board.data.validation):
        raise UserError(f"{path}: race.prompts is what heads are trained or measured on")
    entries = tuple(read_entry(name, value, board, path) for name, value in listed.items())
    for entry in entries:
        if entry.baseline not in (None, *listed):
            raise UserError(f"{path}: the baseline {entry.baseline!r} of {entry.name} is no entry")
    return Board(board.target, board.data, board.train, board.race, entries)


def read_entry(name: str, value: Given, board: Board, path: Path) -> Entry:
    """An entry of the file, with all settings of its training; nothing is loaded.

    Raises UserError if it is wrong.
    """
    section = f"entries.{name}"
    if not isinstance(value.value, dict):
        raise UserError(f"{value.origin}: {section} must hold config:, got {value.value!r}")
    given = {f"{section}.{key}": Given(v, value.origin) for key, v in value.value.items()}
    check_names(given, {section: EntryConfig})
    entry = build_section(section, EntryConfig, given, path)
    for override in entry.overrides:
        if (setting := override.partition("=")[0]) in SHARED:
            raise UserError(f"{value.origin}: {section} sets {setting}, which is the same for all")
    shared: dict[str, str | float | None] = {
        "target.name": board.target.name, "data.train": board.data.train,
        "data.validation": board.data.validation, "train.max_minutes": board.train.minutes,
        "train.output": str(Path(board.train.output, "heads", name)),
    }  # fmt: skip
    written = [written_override(key, value) for key, value in shared.items()]
    settings = (*written, *entry.overrides)
    try:
        run = load_run_config(Path(entry.config), settings)
    except UserError as error:
        raise UserError(f"{section}: {error}") from error
    return Entry(name, ("train", "--config", entry.config, *settings), run, entry.baseline)


def check_board(board: Board) -> dict[str, int]:
    """Raise UserError for what would stop a leaderboard after hours of training.

    Returns the number of trained parameters of each entry; heads are made without memory.
    """
    target = load_decoder_only(board.target.name, board.target.dtype)
    sources = {board.race.prompts}
    parameters = {}
    for entry in board.entries:
        run = entry.run
        sources |= {*run.data.sources, *([run.data.validation] if run.data.validation else [])}
        try:
            check_row_length(target, run.target.name, run.data.max_length)
            run.folder().status(run.train.overwrite)
            family = head_family(run.family)
            with torch.device("meta"):
                head = family(family.sized(run.head, target))
        except UserError as error:
            raise UserError(f"entries.{entry.name}: {error}") from error
        parameters[entry.name] = sum(p.numel() for p in head.parameters() if p.requires_grad)
    for source in sorted(sources):
        if next(iter(read_conversations(source, limit=1)), None) is None:
            raise UserError(f"{source} holds no conversation")
    return parameters


def drafthead(words: Iterable[str]) -> None:
    """Run a verb in a process of its own.

    A stop ends this process too, with status 130; another failure raises UserError. The verb has
    printed why.
    """
    words = list(words)
    with subprocess.Popen([sys.executable, "-m", "drafthead.scripts.cli", *words]) as process:
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the terminal has told the verb as well; it saves its state, then ends
    if status == STOPPED:
        print("stopped; what was trained is kept, and the same command continues")
        raise typer.Exit(STOPPED)
    if status != 0:
        raise UserError(f"failed, for the reason above: drafthead {shlex.join(words)}")


def training_cells(entry: Entry, parameters: int, run: RunSummary) -> list[str]:
    """An entry's row of the table of training."""
    held_out = run.evaluation or {}
    trees = held_out.get("tau_tree", {})
    return [
        entry.name, entry.run.family, f"{parameters / 1e6:.2f}M", str(run.steps),
        f"{run.seconds:.0f}", str(run.supervised_tokens), f"{run.supervised_tokens_per_s:.0f}",
        f"{100 * run.target_share:.0f} %", number(held_out.get("tau_chain")),
        number(trees.get("16")), number(trees.get("32")),
    ]  # fmt: skip


def pair_cells(board: Board, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each baseline of a race, and below it the entries that differ from it in one thing."""
    by_mode = {row["mode"]: row for row in rows}
    cells = []
    for base in board.entries:
        others = [entry for entry in board.entries if entry.baseline == base.name]
        for entry in (base, *others) if others else ():
            row = by_mode[f"head {entry.name}"]
            name = entry.name if entry is base else f"- {entry.name}"
            cells.append([name, *(number(row[field]) for field in RACE_FIELDS)])
    return cells


def markdown(board: Board, trained: list[list[str]], races: dict[str, Any]) -> str:
    """The whole leaderboard as Markdown: training, then each race as `compare` has written it."""
    parts = [
        f"{board.train.minutes:g} minutes of training for each head.",
        "### Training",
        "Seconds are those of optimiser steps, the target's passes included, and of saving; "
        "loading and the last evaluation are not counted. tau on held-out answers: of the best "
        "chain, and of the best fixed trees.",
        Table("", TRAINING_COLUMNS, trained).markdown(),
    ]
    for name, content in races.items():
        parts += [
            f"### Race: {name}",
            (Path(board.train.output, name) / "comparison.md").read_text(),
        ]
        for temperature in board.race.temperatures:
            rows = [row for row in content["rows"] if row["temperature"] == temperature]
            if pairs := pair_cells(board, rows):
                parts += [f"One thing at a time, temperature {temperature:g}:",
                          Table("", RACE_COLUMNS, pairs).markdown()]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def run_board(board: Board) -> None:
    """Train what is not trained, race what is not raced, and write the tables."""
    parameters = check_board(board)
    output = Path(board.train.output)
    for entry in board.entries:
        if entry.run.folder().status(entry.run.train.overwrite) == "finished":
            print(f"{entry.name}: trained already", flush=True)
            continue
        print(f"{entry.name}: training of {board.train.minutes:g} minutes", flush=True)
        for name in board.races():
            (output / name / RESULT).unlink(missing_ok=True)  # it is of other heads
        drafthead(entry.words)
    races = {}
    for name, words in board.races().items():
        result, command = output / name / RESULT, shlex.join(["drafthead", *words])
        if not result.exists() or read_json(result)["command"] != command:
            drafthead(words)
        races[name] = read_json(result)
    runs = {entry.name: summarize(Path(entry.run.train.output)) for entry in board.entries}
    trained = [training_cells(e, parameters[e.name], runs[e.name]) for e in board.entries]
    entries = [
        {"name": entry.name, "family": entry.run.family, "baseline": entry.baseline,
         "parameters": parameters[entry.name], "training": asdict(runs[entry.name]),
         "settings": entry.run.settings()}
        for entry in board.entries
    ]  # fmt: skip
    content = {"race": asdict(board.race), "entries": entries, "races": races}
    write_text(output / "leaderboard.json", json.dumps(content, indent=2) + "\n")
    write_text(output / "leaderboard.md", markdown(board, trained, races))
    print(f"written: {output / 'leaderboard.json'}, leaderboard.md")


def main(
    config: Annotated[Path, typer.Option(help="Such as configs/leaderboard_demo.yaml.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train every listed head for the same time, then race them.

    Settings override the file: ... --config FILE train.minutes=2 race.limit=8
    """
    try:
        run_board(load_board(config, settings or ()))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    typer.run(main)
