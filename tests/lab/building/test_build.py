"""`drafthead build`: how time is divided, what a folder keeps, prompts, the view's lines."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import write_run
from written import random_head

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.heads.formats.drafthead import save_head
from drafthead.lab.building import answering
from drafthead.lab.building.answering import Answering, rows_at_once
from drafthead.lab.building.budget import (
    AT_ONCE,
    Speeds,
    division,
    measuring_seconds,
    rows_of_steps,
)
from drafthead.lab.building.folder import STAGES, BuildFolder, Choices
from drafthead.lab.building.prompts import (
    PromptFiles,
    add_about_texts,
    part_given,
    read_rows,
    write_rows,
)
from drafthead.lab.building.view import Captured
from drafthead.lab.planned_training import TrialOutOfMemoryError
from drafthead.scripts import cli
from drafthead.scripts.building import stages
from drafthead.scripts.building.stages import Building
from drafthead.train.prompts.invention import TooFewMessagesError
from drafthead.train.run.config import load_run_config

DEMO_TARGET = Path(__file__).parents[3] / "assets" / "demo_target"
CHOICES = Choices("model", "auto", "cpu", (), 64, 0, "eagle3", 5.0, False)


def test_time_goes_to_answers_where_they_are_dear_and_to_learning_where_that_is() -> None:
    dear_answers = division(1000, Speeds(100, 1000, 1000))
    dear_learning = division(1000, Speeds(1000, 100, 100))
    assert dear_answers.learnt / dear_answers.answers > 3
    assert 1 < dear_learning.learnt / dear_learning.answers < 2.5
    spent = dear_learning.answers / 1000 + dear_learning.learnt / 100
    assert spent == pytest.approx(1000)


def test_kept_features_are_read_more_often() -> None:
    once, kept = (division(1000, Speeds(200, 200, again)) for again in (200, 400))
    assert kept.worth > 1.15 * once.worth
    assert kept.learnt / kept.answers > 1.3 * once.learnt / once.answers
    seconds = kept.answers / 200 * 2 + (kept.learnt - kept.answers) / 400
    assert seconds == pytest.approx(1000)


def test_no_more_answers_are_made_once_there_are_enough() -> None:
    speeds = Speeds(1000, 100, 100)
    best = division(1000, speeds)
    left = 1000 - best.answers / speeds.answering
    again = division(left, speeds, answered=best.answers)
    assert again.answers == pytest.approx(best.answers, rel=0.05)
    assert division(0, speeds, answered=50).answers == 50


def test_without_a_head_all_time_is_for_answers() -> None:
    assert division(100, Speeds(10, AT_ONCE, AT_ONCE)).answers == pytest.approx(1000, rel=0.01)


def test_short_builds_have_steps_of_fewer_rows() -> None:
    assert [rows_of_steps(32, tokens, 500) for tokens in (4e6, 1e6, 1e4)] == [32, 8, 1]


def test_measuring_leaves_most_of_the_time_to_the_head() -> None:
    assert measuring_seconds(1) <= 30
    assert measuring_seconds(600) == 900


def begun(folder, choices: Choices) -> BuildFolder:
    build = BuildFolder(folder)
    build.begin(choices)
    return build


def test_a_folder_goes_on_where_it_was_killed(tmp_path) -> None:
    build = begun(tmp_path, CHOICES)
    build.finish("prompts", 2.0, {"given": 20})
    build.finish("held out", 3.0, {})
    again = begun(tmp_path, CHOICES)
    assert list(again.stages) == ["prompts", "held out"]
    assert again.stages["prompts"]["given"] == 20
    assert again.seconds == 5.0
    assert "given: 20" in (tmp_path / "build.yaml").read_text()
    (tmp_path / "build.yaml").write_text("choices")
    with pytest.raises(UserError, match=r"build\.yaml cannot be read"):
        begun(tmp_path, CHOICES)


def test_changed_choices_repeat_what_they_touch_or_are_refused(tmp_path) -> None:
    build = begun(tmp_path, CHOICES)
    for stage in STAGES:
        build.finish(stage, 1.0, {})
    longer = begun(tmp_path, replace(CHOICES, minutes=10.0))
    assert list(longer.stages) == ["prompts", "held out"]
    for stage in STAGES:
        longer.finish(stage, 1.0, {})
    compiled = begun(tmp_path, replace(CHOICES, minutes=10.0, compile=True))
    assert list(compiled.stages)[-1] == "evaluate"
    with pytest.raises(UserError, match=r"was started with --target 'model', now 'other'"):
        begun(tmp_path, replace(CHOICES, target="other"))


def test_a_build_starts_from_a_relatives_head(tmp_path) -> None:
    """The head's shape is that of the one that it starts from, whatever the family's file says."""
    target = load_decoder_only(str(DEMO_TARGET))
    old = tmp_path / "old"
    save_head(random_head("medusa", target, {"num_heads": 2}), old, target, "demo", {})
    choices = replace(CHOICES, target=str(DEMO_TARGET), family="medusa", init_from=str(old))
    building = Building(choices, begun(tmp_path / "build", choices))
    assert f"a head (medusa, from {old})" in building.first_plan()
    config = load_run_config(building.config, building.settings)
    assert (config.train.init_from, config.head.num_heads) == (str(old), 2)
    other = replace(choices, family="eagle3")
    with pytest.raises(UserError, match="is a head of --family medusa"):
        Building(other, begun(tmp_path / "other", other)).first_plan()


def test_a_build_offers_a_shipped_head_of_the_targets_shape(tmp_path, monkeypatch) -> None:
    target = load_decoder_only(str(DEMO_TARGET))
    save_head(random_head("eagle3", target, {}), tmp_path / "ours", target, "demo", {})
    monkeypatch.setattr(stages, "SHIPPED_HEADS", {str(tmp_path / "ours"): "ours"})
    for family, offered in (("eagle3", True), ("medusa", False)):
        choices = replace(CHOICES, target=str(DEMO_TARGET), family=family)
        plan = Building(choices, begun(tmp_path / family, choices)).first_plan()
        assert (f"--init-from {tmp_path / 'ours'} starts from" in plan) == offered


def test_nothing_is_written_and_all_may_change_before_a_stage_is_done(tmp_path) -> None:
    build = begun(tmp_path / "x", CHOICES)
    assert not list(tmp_path.iterdir())
    assert build.once("rows", lambda: 128) == 128
    other = begun(tmp_path / "x", replace(CHOICES, target="other", prompts=("mine.jsonl",)))
    assert other.once("rows", lambda: 64) == 64
    other.finish("prompts", 1.0, {})
    with pytest.raises(UserError, match=r"was started with --target 'other', now 'model'"):
        begun(tmp_path / "x", CHOICES)


def test_a_plan_writes_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["build", "--target", str(DEMO_TARGET), "--output", "x", "--minutes", "1", "--plan"]
    monkeypatch.setattr(sys, "argv", ["drafthead", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code and "x, in 60 s: prompts" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("time", [(), ("--minutes", "0"), ("--hours", "-1")])
def test_a_build_needs_time(time, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        sys, "argv", ["drafthead", "build", "--target", "t", "--output", "x", *time]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "give --minutes or --hours" in capsys.readouterr().err


def test_a_target_that_invents_too_slowly_asks_for_prompts(monkeypatch, tmp_path) -> None:
    def slow(*_, seconds: float, **__) -> None:
        raise TooFewMessagesError(f"nothing in {seconds:.0f} seconds")

    monkeypatch.setattr(answering, "invent", slow)
    monkeypatch.setattr(answering, "MessageSource", lambda *_: None)
    monkeypatch.setattr(Answering, "decoder", lambda _: None)
    monkeypatch.setattr(answering, "rows_at_once", lambda _: 32)
    source = Answering(CHOICES, begun(tmp_path, CHOICES))
    with pytest.raises(UserError, match="nothing in 60 seconds: give prompts .* --prompts FILE"):
        source.part_prompts()
    source.folder.finish("prompts", 1.0, {"held": 60})
    rows = [{"id": f"invented-0-{n}", "prompt": "?"} for n in range(3)]
    source.files.train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert source._have_prompts(100, 5.0) == 3, "what there is will do"


def write_prompts(path, number: int) -> None:
    rows = [{"prompt": f"question {n}", "category": "kind"} for n in [*range(number), 0]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_are_parted_and_none_is_in_two_parts(tmp_path) -> None:
    source, files = tmp_path / "prompts.jsonl", PromptFiles(tmp_path)
    write_prompts(source, 40)
    left = part_given([str(source)], 5, 0, files)
    parts = [read_rows(path) for path in (files.train, files.held_out, files.test)]
    texts = [row["messages"][0]["content"] for part in parts for row in part]
    assert [len(part) for part in parts] == [left, 5, 2]
    assert sorted(texts) == sorted({f"question {n}" for n in range(40)})
    assert parts[0][0]["category"] == "kind"
    write_prompts(source, 5)
    with pytest.raises(UserError, match="5 prompts are too few"):
        part_given([str(source)], 5, 0, files)


def test_a_row_may_hold_characters_that_part_lines_elsewhere(tmp_path) -> None:
    rows = [{"prompt": f"a{mark}b"} for mark in "\u2028\u2029\x85\x1c\x0b\r\n"]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_a_third_as_many_prompts_about_texts_are_added_once(tmp_path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"invented-{n}", "prompt": "?"}) + "\n" for n in range(9))
    )
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}
        for text in (" ".join(f"{kind}{n}" for n in range(80)) for kind in "ab")
    ]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert add_about_texts(prompts, answers, 0) == 3
    assert add_about_texts(prompts, answers, 1) == 0
    assert len(read_rows(prompts)) == 12


def test_a_bar_is_shown_and_lines_are_kept() -> None:
    file, bars = io.StringIO(), list[str]()
    captured = Captured(file, bars.append, terminal=False)
    captured.write("first\n\rdistill: 10%")
    captured.write("\rdistill: 20%")
    captured.write("\rdistill: 100%\nlast\n")
    assert bars == ["distill: 10%", "distill: 20%"]
    assert file.getvalue() == "first\ndistill: 100%\nlast\n"


@pytest.mark.parametrize(
    ("table", "words"), [(1.5, ""), (2.1, "--minutes 10"), (9.0, "3,200 answers")]
)
def test_a_head_behind_the_table_is_told_what_it_needs(tmp_path, table, words) -> None:
    folder = begun(tmp_path, CHOICES)
    folder.finish("ngrams", 1.0, {"tau": {"n-grams": table}})
    (tmp_path / "head").mkdir()
    points = [(100, 1.4), (200, 1.6), (400, 1.8), (800, 2.0)]
    lines = [
        {"step": n, "epochs": n / 800, "answers": n, "tau_tree": {"16": tau}} for n, tau in points
    ]
    log = tmp_path / "head" / "evaluation.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = Building(CHOICES, folder).against_the_table()
    assert words in "".join(said) and bool(said) == bool(words)


def test_time_for_compiling_is_kept_and_shown(tmp_path) -> None:
    choices = replace(CHOICES, minutes=30.0, compile=True)
    plain = Building(choices, begun(tmp_path / "plain", choices))
    folder = begun(tmp_path / "compiled", choices)
    folder.finish("plan", 0.0, {"a_graph": 50.0})
    compiled = Building(choices, folder)
    assert compiled.to_learn() == pytest.approx(plain.to_learn() - 200, abs=1)
    for building in (plain, compiled):
        building.expect()
    longer = {n for n in STAGES if compiled.view.expected[n] > plain.view.expected[n] + 99}
    assert longer == {"evaluate", "race"}


def test_a_trial_that_lacks_memory_is_made_again_with_fewer_rows(monkeypatch, tmp_path) -> None:
    building = Building(CHOICES, begun(tmp_path, CHOICES))
    building.settings = []
    rows = {"batch_rows": 6, "micro_batch_rows": 6}
    write_run(building.config, tmp_path, {"family": "eagle3"}, {}, rows)
    tried = []

    def trial(path: Path, settings: list[str]) -> int:
        tried.append(load_run_config(path, settings[:-1]).train.micro_batch_rows)
        if tried[-1] > most:
            raise TrialOutOfMemoryError("the trial failed")
        return tried[-1]

    monkeypatch.setattr(stages, "run_trial", trial)
    for most, expected in ((3, [6, 3]), (1, [3, 1])):
        assert building.fitting_trial(["data.train=other"]) == most and tried == expected
        tried.clear()
    most = 0
    with pytest.raises(TrialOutOfMemoryError):
        building.fitting_trial(["data.train=other"])


def test_prompts_are_invented_further_whatever_memory_is_free_and_however_passes_run(
    monkeypatch, tmp_path
) -> None:
    """A run that was killed, then another card's memory, then enough time to compile."""
    asked = []
    monkeypatch.setattr(answering, "MessageSource", lambda _, settings: asked.append(settings))
    monkeypatch.setattr(answering, "invent", lambda *_, **__: None)
    monkeypatch.setattr(Answering, "decoder", lambda _: None)
    for rows, minutes, compile in ((128, 5.0, None), (64, 5.0, None), (32, 15.0, True)):
        monkeypatch.setattr(answering, "rows_at_once", lambda _, rows=rows: rows)
        choices = replace(CHOICES, minutes=minutes, compile=compile)
        source = Answering(choices, begun(tmp_path, choices))
        source._invent(60, 30.0)
        assert source.rows == 128
    assert asked[0] == asked[1] == asked[2] and asked[0].batch_size == 256


@pytest.mark.parametrize(("free", "rows"), [(1e9, 32), (12e9, 128), (80e9, 256)])
def test_a_gpu_answers_as_many_prompts_as_its_memory_holds(monkeypatch, free, rows) -> None:
    memory = SimpleNamespace(is_recorded=True, most_in_use=11_000_000)  # of one row of SmolLM2
    target = SimpleNamespace(memory=memory, device=None)
    decoder = SimpleNamespace(target=target, generate=lambda *_, **__: None)
    monkeypatch.setattr(answering, "free_memory", lambda device: int(free))
    assert rows_at_once(decoder) == rows
    memory.is_recorded = False  # as on a processor
    assert rows_at_once(decoder) == 32
