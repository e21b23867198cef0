"""Prompts about texts."""

import json
import random
import re
from pathlib import Path

import pytest

from drafthead.core.errors import UserError
from drafthead.train.data.conversations import Conversation
from drafthead.train.prompts.tasks import (
    TASKS,
    SourceText,
    Tasks,
    opening,
    passages,
    prompts_about,
    shortened,
    texts_of,
)

PLAIN = Tasks(
    ("One: {text}", "Opening: {opening}"),
    ("Two: {text} | {other} | {question}",),
    ("Many: {passages}",),
)


def words(count: int, first: int = 0) -> str:
    """Different words, five a sentence."""
    return " ".join(f"w{n}." if n % 5 == 4 else f"w{n}" for n in range(first, first + count))


def conversation(answer: str, role: str = "assistant") -> Conversation:
    messages = [{"role": "user", "content": "why?"}, {"role": role, "content": answer}]
    return Conversation("a", messages, "f.jsonl:1")


TEXTS = [SourceText(words(90, first).split(" "), f"q{first}") for first in (0, 100, 200)]


def test_long_answers_without_repetition_are_texts() -> None:
    rows = [
        conversation(words(80)),
        conversation(words(20)),
        conversation("again and again " * 30),
        conversation(words(80), role="user"),
        Conversation("b", [{"role": "user", "content": words(80)}], "f.jsonl:2"),
    ]
    [text] = texts_of(rows)
    assert text == SourceText(words(80).split(" "), "why?")


def asked(number: int, seed: int, most_passages: int = 4) -> list[str]:
    return list(prompts_about(TEXTS, PLAIN, number, seed, most_passages))


def test_prompts_are_about_two_texts_about_many_and_about_one_in_turn() -> None:
    kinds = [prompt.split(":")[0] for prompt in asked(9, seed=1)]
    assert kinds[0::3] == ["Two"] * 3 and kinds[1::3] == ["Many"] * 3
    assert set(kinds[2::3]) <= {"One", "Opening"}


def test_a_text_stands_anywhere_among_numbered_passages() -> None:
    many = [passages(TEXTS[1], TEXTS, 4, random.Random(seed)) for seed in range(60)]
    starts = [re.findall(r"Passage (\d): w(\d+)", prompt) for prompt in many]
    assert {len(found) for found in starts} == {3, 4}
    for found in starts:
        assert [number for number, _ in found] == ["1", "2", "3", "4"][: len(found)]
        assert "100" in [word for _, word in found]
    assert {found[0][1] for found in starts} == {"0", "100", "200"}


def test_each_text_is_asked_about_before_one_is_asked_about_again() -> None:
    one = Tasks(("{text}",), ("{text}",), ("{text}",))
    firsts = [prompt.split()[0] for prompt in prompts_about(TEXTS, one, 6, seed=2, most_passages=3)]
    assert set(firsts[:3]) == set(firsts[3:]) == {"w0", "w100", "w200"}


def test_a_seed_gives_the_same_prompts() -> None:
    first, again, other = (asked(5, seed) for seed in (3, 3, 4))
    assert first == again != other


def test_texts_end_with_a_sentence() -> None:
    assert all(shortened(TEXTS[0], random.Random(seed)).endswith(".") for seed in range(30))
    assert opening(TEXTS[0], 2) == "w0 w1 w2 w3 w4. w5 w6 w7 w8 w9."


def test_one_text_is_too_few() -> None:
    with pytest.raises(UserError, match="at least 2 are needed"):
        list(prompts_about(TEXTS[:1], PLAIN, 5, seed=0, most_passages=3))


def test_the_tasks_that_are_shipped_can_be_read() -> None:
    tasks = Tasks.read(TASKS)
    assert len(list(prompts_about(TEXTS, tasks, 200, 0, 6))) == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "about_one: ['{text']\nabout_two: [a]\nabout_many: [a]",
            r"about_one\.0: a task may name \{text\}",
        ),
        ("about_one: ['{texts}']\nabout_two: [a]\nabout_many: [a]", "KeyError"),
        ("about_one: ['{text:d}']\nabout_two: [a]\nabout_many: [a]", "nothing else"),
        ("about_one: ['{}']\nabout_two: [a]\nabout_many: [a]", "nothing else"),
        ("about_one: [3]\nabout_two: [a]\nabout_many: [a]", "valid string .*found: 3"),
        ("about_one: [a]\nabout_two: []\nabout_many: [a]", "about_two: .*at least 1 item"),
        ("about_one: null\nabout_two: [a]\nabout_many: [a]", "about_one: .*valid tuple"),
        ("about_one: ['{text}']\nabout_two: [a]", "about_many: Field required"),
        ("about_one: [a]\nabout_two: [a]\nabout_many: [a]\nabout_three: [a]", "about_three"),
        ("nothing", "lists of texts about_one, about_two and about_many"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tasks.yaml").write_text(content)
    with pytest.raises(UserError, match=message):
        Tasks.read(tmp_path / "tasks.yaml")


def test_the_verb_writes_what_distill_reads(tmp_path: Path, drafthead) -> None:
    rows = [{"messages": conversation(words(80, first)).messages} for first in (0, 100)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words_ = ["--about", f"{tmp_path}/a.jsonl", "--number", "5", "--output", f"{tmp_path}/b.jsonl"]
    status, out, _ = drafthead("data", "invent", *words_)
    assert status == 0 and "5 prompts about 2 texts" in out
    assert drafthead("data", "invent", *words_)[0] == 2  # a second run leaves the file alone
    written = [json.loads(line) for line in (tmp_path / "b.jsonl").open()]
    assert [row["id"] for row in written] == [f"about-0-{n}" for n in range(5)]
