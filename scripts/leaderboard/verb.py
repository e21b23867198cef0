"""`drafthead leaderboard`: train every head on the same data for the same time, then race them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drafthead.heads.formats.files import read_json
from drafthead.heads.target.target import Target
from drafthead.scripts.leaderboard.config import Board, load_board
from drafthead.scripts.leaderboard.report import (
    RESULT,
    BoardReport,
    EntryReport,
    Lap,
    print_board,
    write_board,
)
from drafthead.scripts.leaderboard.training import check_board, train_entries
from drafthead.scripts.measuring import describe_run, prompt_ids
from drafthead.scripts.racing import Drafters, run_races
from drafthead.train.run_summary import summarize


def main(
    config: Annotated[Path, typer.Option(help="Such as configs/leaderboard_demo.yaml.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train every listed head with one budget, then race them, and write a table and a picture.

    \b
    A file has the sections
      target    name, dtype: the model that drafts are made for
      data      train, validation: conversations, from `drafthead distill`
      train     minutes for each head, output folder
      race      prompts, draft_model, temperatures, limit, max_new_tokens, rounds,
                engines [eager, compiled], tree_nodes [planned, 16]
      entries   NAME: {config: a training file, overrides: [SECTION.KEY=VALUE], baseline: NAME}
    Settings behind it win over it: ... --config FILE train.minutes=2 race.engines=[eager]

    Minutes count optimiser steps, the target's forward passes included, and saving; loading models
    and data, and the evaluation at the end, are outside, for every head alike. An entry with a
    baseline is shown beside it. Everything is checked before anything is trained.

    Ctrl-C at any time: the same command goes on where it was. Finished heads are not trained again,
    and the race is run again only if something changed or leaderboard.json is gone.
    """
    board = load_board(config, settings or [])
    parameters = check_board(board)
    minutes = board.train.minutes * len(board.entries)
    print(f"{len(board.entries)} heads, {minutes:g} minutes of training in all, then the race")
    trained = train_entries(board, lambda text: print(text, flush=True))
    if trained.stopped:
        print("stopped; what was trained is kept, the same command goes on")
        raise typer.Exit(130)
    if not trained.anew and is_raced(board):
        print(f"{board.output / RESULT} holds this very race: nothing to do")
        return
    entries = [
        EntryReport(entry.name, entry.run.family, entry.baseline, parameters[entry.name],
                    summarize(entry.folder))
        for entry in board.entries
    ]  # fmt: skip
    about, laps = race_board(board)
    report = BoardReport({**about, "settings": board.settings()}, entries, laps)
    print_board(report)
    write_board(report, board.output)
    print(f"written: {board.output / RESULT}, leaderboard.md, leaderboard.png")


def race_board(board: Board) -> tuple[dict[str, Any], list[Lap]]:
    """One lap for each engine and temperature, and what a reader needs to judge the numbers."""
    race = board.race
    target = Target.from_pretrained(board.target.name, board.target.dtype)
    assistant = (
        Target.from_pretrained(race.draft_model, board.target.dtype) if race.draft_model else None
    )
    folders = [entry.folder for entry in board.entries]
    laps: list[Lap] = []
    for engine in race.engines:
        print(f"race on the {engine} engine", flush=True)
        compiled = engine == "compiled"
        drafters = Drafters(target, folders, assistant, race.draft_tokens, race.sizes(), compiled)
        prompts = prompt_ids(race.prompts, race.limit, drafters.plain, race.max_new_tokens)
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
