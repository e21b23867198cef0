"""`drafthead leaderboard`: train every head on the same data for the same time, then race them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drafthead.heads.formats.files import read_json
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.model_drafter import load_draft_model
from drafthead.lab.races.racing import Drafters, run_races
from drafthead.lab.races.record import describe_run, read_prompts
from drafthead.train.run.summary import summarize
from leaderboard.config import Board, load_board
from leaderboard.report import (
    RESULT,
    BoardReport,
    EntryReport,
    Lap,
    print_board,
    write_board,
)
from leaderboard.training import check_board, train_entries


def main(
    config: Annotated[
        Path, typer.Option(help="Leaderboard file, such as configs/leaderboard_demo.yaml.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train every listed head for the same time, then race them, and write a table and a picture.

    \b
    A file has the sections
      target    name, dtype: the model that drafts are made for
      data      train, validation: conversations, from `drafthead distill`
      train     minutes for each head, output folder
      race      prompts, draft_model, temperatures, limit, max_new_tokens, rounds,
                engines [eager, compiled], tree_nodes [planned, 16]
      entries   NAME: {config: a training file, overrides: [SECTION.KEY=VALUE], baseline: NAME}
    Settings after it override it: ... --config FILE train.minutes=2 race.engines=[eager]

    Minutes count optimiser steps, with the target's forward passes, and saving; they do not count
    loading and the last evaluation, for any head. An entry with a baseline is shown next to it.
    Everything is checked before anything is trained.

    Ctrl-C is safe at any time: the same command continues. Finished heads are not trained again,
    and the race is run again only if a setting changed or leaderboard.json is missing.
    """
    board = load_board(config, settings or [])
    parameters = check_board(board)
    trained = train_entries(board)
    if trained.stopped:
        print("stopped; all that was trained is kept, the same command continues")
        raise typer.Exit(130)
    if not trained.any_new and is_raced(board):
        print(f"{board.output / RESULT} holds this race: nothing to do")
        return
    report = raced_report(board, parameters)
    print_board(report)
    write_board(report, board.output)


def raced_report(board: Board, parameters: dict[str, int]) -> BoardReport:
    """Race the trained heads; `parameters` is the number that training changes, by entry."""
    entries = [
        EntryReport(entry.name, entry.run.family, entry.baseline, parameters[entry.name],
                    summarize(entry.folder))
        for entry in board.entries
    ]  # fmt: skip
    about, laps = race_board(board)
    return BoardReport({**about, "settings": board.settings()}, entries, laps)


def race_board(board: Board) -> tuple[dict[str, Any], list[Lap]]:
    """Machine, versions and settings, and one lap per engine and temperature."""
    race = board.race
    target = Target.from_pretrained(board.target.name, board.target.dtype)
    small, dtype = race.draft_model, board.target.dtype
    assistant = load_draft_model(small, target, dtype) if small else None
    folders = [entry.folder for entry in board.entries]
    laps: list[Lap] = []
    for engine in race.engines:
        print(f"race on the {engine} engine", flush=True)
        compiled = engine == "compiled"
        drafters = Drafters(target, folders, assistant, race.draft_tokens, race.sizes(), compiled)
        prompts = read_prompts(race.prompts, race.limit, drafters.plain, race.max_new_tokens)
        rows, differing = run_races(drafters, prompts, race.terms(), assisted=False)
        laps += [
            Lap(
                engine,
                temperature,
                [row for row in rows if row.temperature == temperature],
                differing if temperature == 0 else [],
            )
            for temperature in race.temperatures
        ]
    about = {
        **describe_run(board.target.name, target),
        "prompts": len(prompts),
        "max_new_tokens": race.max_new_tokens,
        "rounds": race.rounds,
        "minutes": board.train.minutes,
    }
    return about, laps


def is_raced(board: Board) -> bool:
    """Whether the output folder holds the result of a race with the same settings."""
    path = board.output / RESULT
    wanted = json.loads(json.dumps(board.settings()))
    return path.exists() and read_json(path).get("settings") == wanted
