"""A leaderboard on a tiny target: checked before it trains, resumable, and written whole."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from tiny import write_conversations, write_target

import leaderboard
from drafthead.core.errors import UserError
from drafthead.scripts import cli
from drafthead.train.run.folder import summarize
from leaderboard import check_board, load_board, run_board


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, conversations, prompts, a training file and a leaderboard of two families."""
    folder = tmp_path_factory.mktemp("board")
    write_target(folder / "target", max_position_embeddings=128, initializer_range=0.02)
    for seed, name in enumerate(("train", "validation", "test")):
        write_conversations(folder / f"{name}.jsonl", 12, seed)
    run = {
        "target": {"name": "elsewhere"},
        "data": {"train": "elsewhere.jsonl", "max_length": 64},
        "train": {"output": "elsewhere", "epochs": 1, "batch_rows": 2, "micro_batch_rows": 2,
                  "cpu": True},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    entry = {"config": str(folder / "run.yaml")}
    board = {
        "target": {"name": str(folder / "target"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"),
                 "validation": str(folder / "validation.jsonl")},
        "train": {"minutes": 0.01, "output": str(folder / "out")},
        "race": {"prompts": str(folder / "test.jsonl"), "temperatures": [0], "limit": 2,
                 "max_new_tokens": 8, "rounds": 1, "tree_nodes": [6]},
        "entries": {
            "medusa": {**entry, "overrides": ["head.num_heads=2"]},
            "eagle": {**entry, "overrides": ["head.family=eagle", "head.depth=2"],
                      "baseline": "medusa"},
        },
    }  # fmt: skip
    (folder / "board.yaml").write_text(yaml.safe_dump(board, sort_keys=False))
    return folder


in_its_own_process = leaderboard.drafthead


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs run here: a new process would import everything again."""

    def run(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["drafthead", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        if stop.value.code:
            raise UserError(f"failed: {words}")

    monkeypatch.setattr(leaderboard, "drafthead", run)


@pytest.mark.usefixtures("in_this_process")
def test_a_leaderboard_is_trained_raced_and_written_and_then_left_alone(folder, capfd) -> None:
    run_board(load_board(folder / "board.yaml"))
    content = json.loads((folder / "out" / "leaderboard.json").read_text())
    assert [entry["name"] for entry in content["entries"]] == ["medusa", "eagle"]
    for entry in content["entries"]:
        assert entry["parameters"] > 0 and entry["training"]["seconds"] >= 60 * 0.01
    modes = {row["mode"] for row in content["races"]["race-6"]["rows"]}
    assert {"plain", "generate", "head medusa", "head eagle"} <= modes
    text = (folder / "out" / "leaderboard.md").read_text()
    assert "| medusa | medusa |" in text and "| head eagle |" in text and "| - eagle |" in text

    raced = folder / "out" / "race-6" / "comparison.json"
    before = raced.stat().st_mtime_ns
    capfd.readouterr()
    run_board(load_board(folder / "board.yaml"))
    assert capfd.readouterr().out.count("trained already") == 2
    assert raced.stat().st_mtime_ns == before


@pytest.mark.usefixtures("in_this_process")
def test_a_failed_training_names_its_verb_and_keeps_the_others(folder, monkeypatch) -> None:
    """Verbs are processes of their own for users; this one fails at once."""

    def run(words: Iterable[str]) -> None:
        words = list(words)
        (in_its_own_process if "nowhere" in " ".join(words) else here)(words)

    here, start = leaderboard.drafthead, subprocess.Popen
    monkeypatch.setattr(leaderboard, "drafthead", run)
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **how: start(["false"] if "nowhere" in str(command) else command, **how),
    )
    bad = f"{{config: {folder / 'run.yaml'}, overrides: [train.init_from=nowhere]}}"
    board = load_board(
        folder / "board.yaml", [f"train.output={folder / 'failing'}", f"entries.eagle={bad}"]
    )
    with pytest.raises(UserError, match="drafthead train .*heads/eagle"):
        run_board(board)
    assert summarize(folder / "failing" / "heads" / "medusa").steps > 0
    assert not (folder / "failing" / "race-6").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["head.family=medussa"], "entries.bad.*medussa.*known families"),
        (["head.hidden_size=8"], "entries.bad: head.hidden_size is 8"),
        (["head.family=parallel", "head.taps=[0, 7]"], "entries.bad: .*head.taps is"),
        (["data.max_length=4096"], "entries.bad: data.max_length is 4096"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["train.max_minutes=9"], "train.max_minutes, which is the same for all"),
    ],
)
def test_an_entry_that_cannot_work_is_refused_before_anything_is_trained(
    folder, overrides, sentence
) -> None:
    entry = yaml.safe_dump({"config": str(folder / "run.yaml"), "overrides": overrides})
    with pytest.raises(UserError, match=sentence):
        check_board(load_board(folder / "board.yaml", [f"entries.bad={entry}"]))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("entries.bad=medusa", "must hold config:"),
        ("entries.bad={}", "lacks entries.bad.config"),
        ("entries.bad={config: nowhere.yaml}", "entries.bad: cannot read.*nowhere.yaml"),
        ("entries.bad={config: x, overides: []}", "unknown setting.*overrides"),
        ("entries.bad={config: FOLDER/run.yaml, baseline: good}", "'good' of bad is no entry"),
        ("race.prompts=FOLDER/validation.jsonl", "trained or measured on"),
        ("race.tree_nodes=[fast]", "race.tree_nodes"),
        ("train.minutes=0", "above 0"),
        ("train.seconds=9", "unknown setting train.seconds"),
    ],
)
def test_a_wrong_setting_is_named(folder, override, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        load_board(folder / "board.yaml", [override.replace("FOLDER", str(folder))])
