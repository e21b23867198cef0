"""A leaderboard on a tiny target: checked before it trains, resumable, and told whole."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tiny import write_conversations, write_target

from drafthead.heads.errors import UserError
from drafthead.scripts import cli
from drafthead.train.run.summary import summarize
from leaderboard import training
from leaderboard.config import Board, Entry, load_board
from leaderboard.training import check_board


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, conversations, prompts, a training file and a leaderboard of two families."""
    folder = tmp_path_factory.mktemp("board")
    for name in ("target", "draft"):
        write_target(folder / name, max_position_embeddings=128, initializer_range=0.02)
    for seed, name in enumerate(("train", "validation", "test", "other")):
        write_conversations(folder / f"{name}.jsonl", 12, seed)
    run = {
        "target": {"name": "elsewhere"},
        "data": {"train": "elsewhere.jsonl", "max_length": 64},
        "optimizer": {"lr": 1e-3},
        "train": {"output": "elsewhere", "epochs": 1, "batch_rows": 2, "micro_batch_rows": 2,
                  "cpu": True},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    entry = {"config": str(folder / "run.yaml")}
    board = {
        "target": {"name": str(folder / "target"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"),
                 "validation": str(folder / "validation.jsonl")},
        "train": {"minutes": 0.02, "output": str(folder / "out")},
        "race": {"prompts": str(folder / "test.jsonl"), "draft_model": str(folder / "draft"),
                 "temperatures": [0, 1], "limit": 2, "max_new_tokens": 12, "rounds": 1,
                 "engines": ["eager"], "tree_nodes": [6]},
        "entries": {
            "medusa": {**entry, "overrides": ["head.num_heads=2"]},
            "eagle": {**entry, "overrides": ["head.family=eagle", "head.depth=2"],
                      "baseline": "medusa"},
        },
    }  # fmt: skip
    (folder / "board.yaml").write_text(yaml.safe_dump(board, sort_keys=False))
    return folder


def board_with(folder: Path, path: Path, **entries: object) -> Board:
    """The leaderboard with other entries."""
    content = yaml.safe_load((folder / "board.yaml").read_text())
    content["entries"] = entries
    path.write_text(yaml.safe_dump(content))
    return load_board(path)


@pytest.fixture
def leaderboard(folder, monkeypatch, capfd):
    """Run `drafthead leaderboard` in this process; gives its status and output."""

    def run(*settings: str) -> tuple[int, str, str]:
        words = ["drafthead", "leaderboard", "--config", str(folder / "board.yaml"), *settings]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        output = capfd.readouterr()
        return int(stop.value.code or 0), output.out, output.err

    return run


def test_a_leaderboard_is_trained_raced_and_told_and_then_left_alone(leaderboard, folder) -> None:
    status, out, err = leaderboard()
    assert status == 0, err
    content = json.loads((folder / "out" / "leaderboard.json").read_text())
    assert [entry["name"] for entry in content["entries"]] == ["medusa", "eagle"]
    for entry in content["entries"]:
        training = entry["training"]
        assert entry["parameters"] > 0 and training["steps"] > 0
        assert 0 < training["target_share"] < 1
        assert training["evaluation"]["tau_chain"] >= 1
        assert training["seconds"] >= 60 * 0.02
    assert [(lap["engine"], lap["temperature"]) for lap in content["laps"]] == [
        ("eager", 0), ("eager", 1)
    ]  # fmt: skip
    modes = {"plain", "generate", "draft model", "prompt lookup", "head medusa", "head eagle"}
    for lap in content["laps"]:
        assert {row["mode"] for row in lap["rows"]} == modes
        medusa = next(row for row in lap["rows"] if row["drafter"] == "medusa")
        assert 2 <= medusa["tree_nodes"] <= 6 and medusa["draft_cost"] > 0 and medusa["tau"] >= 1
    assert content["laps"][0]["divergences"] == [], "float32"
    text = (folder / "out" / "leaderboard.md").read_text()
    assert "| head eagle |" in text and "| - eagle |" in text and "0.02 minutes" in text
    assert (folder / "out" / "leaderboard.png").read_bytes().startswith(b"\x89PNG")

    status, out, err = leaderboard()
    assert status == 0 and "nothing to do" in out and out.count("trained already") == 2
    (folder / "out" / "leaderboard.json").unlink()
    status, out, err = leaderboard("race.temperatures=[0]")
    assert status == 0 and out.count("trained already") == 2, "only the race is run again"
    assert len(json.loads((folder / "out" / "leaderboard.json").read_text())["laps"]) == 1


@pytest.fixture
def four_steps_each(monkeypatch) -> None:
    """Training ends by steps: in a second a busy machine may make one, and no loss is wrong yet."""
    train, steps = training.train_in_process, ("train.max_minutes=null", "train.max_steps=4")

    def train_so_long(entry: Entry) -> bool:
        return train(replace(entry, settings=(*entry.settings, *steps)))

    monkeypatch.setattr(training, "train_in_process", train_so_long)


@pytest.mark.usefixtures("four_steps_each")
def test_a_failed_training_names_the_entry_and_keeps_the_others(leaderboard, folder) -> None:
    output = folder / "failing"
    status, _, err = leaderboard(
        f"train.output={output}", "entries.medusa={config: %s}" % (folder / "run.yaml"),
        "entries.eagle={config: %s, overrides: [optimizer.lr=1.0e+30, head.family=eagle]}"
        % (folder / "run.yaml"),
    )  # fmt: skip
    assert status == 2 and "training eagle failed" in err and "the loss became" in err
    assert summarize(output / "heads" / "medusa").steps == 4
    assert not (output / "leaderboard.json").exists()


REFUSALS = {
    "no family": (["head.family=medussa"], "entries.bad.*medussa.*known families"),
    "no setting": (["head.widht=3"], "entries.bad.*widht"),
    "the width of another target": (["head.hidden_size=8"], "entries.bad: head.hidden_size is 8"),
    "taps outside the target": (
        ["head.family=parallel", "head.taps=[0, 7]"], "entries.bad: .*head.taps is"
    ),
    "rows beyond the context": (["data.max_length=4096"], "entries.bad: data.max_length is 4096"),
    "portions that do not divide": (["train.batch_rows=3"], "entries.bad: train.batch_rows=3"),
    "no data": (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
    "its own duration": (["train.max_minutes=9"], "train.max_minutes, which is the same for all"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_an_entry_that_cannot_work_is_refused_before_anything_is_trained(
    folder, tmp_path, case
) -> None:
    overrides, sentence = REFUSALS[case]
    config = str(folder / "run.yaml")
    with pytest.raises(UserError, match=sentence):
        check_board(
            board_with(
                folder,
                tmp_path / "board.yaml",
                good={"config": config},
                bad={"config": config, "overrides": overrides},
            )
        )


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("medusa", "must hold config:"),
        ({}, "lacks entries.bad.config"),
        ({"config": "nowhere.yaml"}, "entries.bad: cannot read.*nowhere.yaml"),
        ({"config": "run.yaml", "overides": []}, "unknown setting.*overrides"),
        ({"config": "@run.yaml", "baseline": "good"}, "'good' of bad is not an entry"),
    ],
)
def test_a_wrong_entry_is_told_what_is_wrong(folder, tmp_path, entry, sentence) -> None:
    if isinstance(entry, dict) and str(entry.get("config")).startswith("@"):
        entry = {**entry, "config": str(folder / "run.yaml")}
    with pytest.raises(UserError, match=sentence):
        board_with(folder, tmp_path / "board.yaml", bad=entry)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("race.prompts={validation}", "trained or measured on"),
        ("race.prompts=nowhere.jsonl", "nowhere.jsonl"),
        ("race.draft_model=nowhere", "nowhere"),
        ("race.engines=[fast]", "race.engines"),
        ("race.engines=[]", "engines must hold"),
        ("race.tree_nodes=[1]", "at least 2"),
        ("race.rounds=0", "at least 1 round"),
        ("train.minutes=0", "above 0"),
        ("train.seconds=9", "unknown setting train.seconds"),
        ("target.name=nowhere", "nowhere"),
    ],
)
def test_a_board_that_cannot_be_raced_is_refused(folder, override, sentence) -> None:
    wanted = override.format(validation=folder / "validation.jsonl")
    with pytest.raises(UserError, match=sentence):
        check_board(load_board(folder / "board.yaml", [wanted]))
