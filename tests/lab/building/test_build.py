"""`drafthead build`: how time is divided, what a folder keeps, prompts, the view's lines."""

import io
import json
import math
import sys
import time
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
from drafthead.lab.building.answering import BuildAnswers, rows_at_once
from drafthead.lab.building.budget import (
    AT_ONCE,
    FEWEST_TOKENS,
    Speeds,
    division,
    measuring_seconds,
    minutes_for,
    rows_of_steps,
)
from drafthead.lab.building.choices import Choices
from drafthead.lab.building.folder import STAGES, BuildFolder
from drafthead.lab.building.prompts import (
    PromptFiles,
    add_about_texts,
    part_given,
    read_rows,
    write_rows,
)
from drafthead.lab.building.view import Captured
from drafthead.lab.reports.run_page import Section
from drafthead.lab.trial import TrialOutOfMemoryError
from drafthead.scripts import cli
from drafthead.scripts.building import stages
from drafthead.scripts.building.stages import Building
from drafthead.train.prompts.invention import TooFewMessagesError
from drafthead.train.run.config import load_run_config

DEMO_TARGET = Path(__file__).parents[3] / "assets" / "demo_target"
CHOICES = Choices(
    target="model", dtype="auto", device="cpu", max_new_tokens=64, minutes=5.0, compile=False
)


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


@pytest.mark.parametrize("speed", [7.0, 16.0, 34.0, 60.0, 500.0])
@pytest.mark.parametrize("used", [0.0, 100.0, 900.0])
def test_the_minutes_that_a_head_needs_are_enough_and_not_more(speed: float, used: float) -> None:
    """All but the 30 % for measuring, at most 900 s, are for answers and for learning."""
    seconds = 2 * FEWEST_TOKENS / speed
    minutes = math.ceil((20_000 / speed + used) / 42)
    if minutes > 50:
        minutes = math.ceil((20_000 / speed + used + 900) / 60)
    found = minutes_for(seconds, used)
    assert found == minutes or found == 2  # measuring takes 25 s at least
    assert 60 * found - used - measuring_seconds(found) >= seconds


class Clock:
    """A machine on which an answer takes some seconds, and nothing else any."""

    def __init__(self, monkeypatch, seconds: float):
        self.now, self.seconds, self.wanted = 0.0, seconds, list[int]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(BuildAnswers, "_distil", lambda _, *given: self.distil(*given))
        monkeypatch.setattr(BuildAnswers, "decoder", lambda _: None)
        monkeypatch.setattr(answering, "rows_at_once", lambda _: 32)

    def distil(self, prompts: Path, output: Path, wanted: int) -> SimpleNamespace:
        there = read_rows(output)
        tokens = {"token_ids": [{"answer": [5] * 100}]}
        write_rows(output, [*there, *[tokens] * (wanted - len(there))])
        written = wanted - len(there)
        self.now += self.seconds * written
        self.wanted.append(wanted)
        statistics = SimpleNamespace(lengths=[100] * wanted, rows=wanted)
        return SimpleNamespace(written=written, statistics=statistics, tokens=100 * written)


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0.1, [4, 48]), (1.0, [4, 45]), (10.0, [4]), (1000.0, [4])]
)
def test_held_out_answers_keep_to_their_part_of_the_time(
    monkeypatch, tmp_path, seconds, wanted
) -> None:
    """45 s of five minutes; four answers are made whatever they take."""
    choices = replace(CHOICES, prompts=("mine.jsonl",))
    source, clock = BuildAnswers(choices, begun(tmp_path, choices)), Clock(monkeypatch, seconds)
    write_rows(source.files.held_out, [{"prompt": f"{n}"} for n in range(48)])
    facts = source.answer_held_out()
    assert clock.wanted == wanted and facts["answers"] == wanted[-1]
    assert facts["said"] == [f"answers to {wanted[-1]} of 48 held-out prompts"]
    assert facts["tokens_per_s"] == pytest.approx(100 / seconds)


@pytest.mark.parametrize(("left", "least", "most"), [(0.0, 4, 4), (60.0, 4, 6), (4000.0, 64, 400)])
def test_answers_to_learn_from_keep_to_the_time_that_is_left(
    monkeypatch, tmp_path, left, least, most
) -> None:
    """An answer takes ten seconds."""
    choices = replace(CHOICES, prompts=("mine.jsonl",))
    folder = begun(tmp_path, choices)
    source, clock = BuildAnswers(choices, folder), Clock(monkeypatch, 10.0)
    write_rows(source.files.train, [{"prompt": f"{n}"} for n in range(1000)])
    folder.finish("held out", 1.0, {"tokens_per_s": 10.0, "length": 100.0})
    folder.finish("plan", 1.0, {"trains": False})
    view = SimpleNamespace(seconds=0.0, expected={})
    assert least <= source.answer(lambda: max(0.0, left - clock.now), view)["answers"] <= most
    assert clock.now <= max(left, 10.0 * 4)


def test_a_race_has_the_prompts_and_tokens_that_there_is_time_for(monkeypatch, tmp_path) -> None:
    choices = replace(CHOICES, max_new_tokens=192)
    folder = begun(tmp_path, choices)
    folder.finish("held out", 0.0, {"length": 100.0})
    folder.finish("plan", 0.0, {"seconds_a_token": 0.1})
    building = Building(choices, folder)
    sizes = []
    for used in (0.0, 220.0, 400.0):  # of 300 s, of which half of what is left is raced
        folder.finish("answers", used, {})
        sizes.append(building.race_size())
    assert sizes == [(4, 93), (4, 32), (4, 32)]
    folder.finish("plan", 0.0, {"seconds_a_token": 0.001})
    folder.finish("answers", 0.0, {})
    prompts, tokens = building.race_size()
    assert 360 < prompts <= 375 and tokens == 128


def test_a_build_says_once_that_its_time_is_over(monkeypatch, tmp_path) -> None:
    folder = begun(tmp_path, CHOICES)
    building, said = Building(CHOICES, folder), list[str]()
    monkeypatch.setattr(building.view, "say", said.append)
    building.tell_of_time()
    folder.finish("answers", 300.0, {})
    for _ in range(2):
        building.tell_of_time()
    assert said == ["    5 min are over: goes on with the least that a verdict needs"]
    assert not building.to_learn()


def test_a_full_disk_is_said_before_anything_is_made(monkeypatch, tmp_path) -> None:
    usage = SimpleNamespace(free=700_000)
    monkeypatch.setattr(stages, "disk_usage", lambda _: usage)
    choices = replace(CHOICES, target=str(DEMO_TARGET))
    with pytest.raises(UserError, match=r"is full \(0.7 MB are free\): make room, or choose"):
        Building(choices, begun(tmp_path / "x", choices)).first_plan()
    usage.free = 200_000_000
    Building(choices, begun(tmp_path / "x", choices)).first_plan()


def test_a_page_without_a_head_says_why_and_how_to_decode(monkeypatch, tmp_path) -> None:
    folder = begun(tmp_path, replace(CHOICES, prompts=("mine.jsonl",)))
    folder.finish("plan", 1.0, {"trains": False, "said": ["no head is trained: why"]})
    folder.finish("race", 1.0, {"fastest": "lookup", "headline": "lookup is fastest"})
    building = Building(CHOICES, folder)
    monkeypatch.setattr(stages, "comparison_section", lambda _: Section("Race"))
    building.report()
    page = (tmp_path / "report.html").read_text()
    for words in ("no head is trained: why", "drafthead chat --target model", "lookup is fastest"):
        assert words in page


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
        sys, "argv", ["drafthead", "build", "--target", "smollm2", "--output", "x", *time]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "give --minutes or --hours" in capsys.readouterr().err


def test_a_target_that_invents_too_slowly_asks_for_prompts(monkeypatch, tmp_path) -> None:
    def slow(*_, seconds: float, **__) -> None:
        raise TooFewMessagesError(f"nothing in {seconds:.0f} seconds")

    monkeypatch.setattr(answering, "invent", slow)
    monkeypatch.setattr(answering, "MessageSource", lambda *_: None)
    monkeypatch.setattr(BuildAnswers, "decoder", lambda _: None)
    monkeypatch.setattr(answering, "rows_at_once", lambda _: 32)
    source = BuildAnswers(CHOICES, begun(tmp_path, CHOICES))
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
    left, said = part_given([str(source)], 5, 0, files)
    parts = [read_rows(path) for path in (files.train, files.held_out, files.test)]
    texts = [row["messages"][0]["content"] for part in parts for row in part]
    assert [len(part) for part in parts] == [left, 5, 2]
    assert sorted(texts) == sorted({f"question {n}" for n in range(40)})
    assert parts[0][0]["category"] == "kind" and not said
    write_prompts(source, 5)
    with pytest.raises(UserError, match="5 prompts are too few"):
        part_given([str(source)], 5, 0, files)


def test_prompts_that_cannot_be_replayed_are_counted(tmp_path) -> None:
    source, asked = tmp_path / "chats.jsonl", {"role": "user", "content": "?"}
    called = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "1"}]
    rows = [{"messages": [{**asked, "content": f"question {n}"}]} for n in range(20)]
    rows += [{"messages": [asked, *called, {**asked, "content": f"{n}"}]} for n in range(10)]
    write_rows(source, rows)
    left, said = part_given([str(source)], 5, 0, PromptFiles(tmp_path))
    assert left == 20 - 4 - 2 and len(said) == 1
    assert said[0].startswith("10 of 30 prompts are left out: ") and "role `tool`" in said[0]


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
    captured = Captured(file, bars.append)
    captured.write("first\n\rdistill: 10%")
    captured.write("\rdistill: 20%")
    captured.write("\rdistill: 100%|####  | 8/8 [00:10<00:00, 2 tokens]\nlast\n")
    assert bars == ["distill: 10%", "distill: 20%"]
    assert file.getvalue() == "first\ndistill: 100% 8/8 [00:10<00:00, 2 tokens]\nlast\n"


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

    def trial(path: Path, settings: list[str], seconds: float) -> int:
        assert seconds == 30  # a tenth of the build's time
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
    monkeypatch.setattr(BuildAnswers, "decoder", lambda _: None)
    for rows, minutes, compile in ((128, 5.0, None), (64, 5.0, None), (32, 15.0, True)):
        monkeypatch.setattr(answering, "rows_at_once", lambda _, rows=rows: rows)
        choices = replace(CHOICES, minutes=minutes, compile=compile)
        source = BuildAnswers(choices, begun(tmp_path, choices))
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
