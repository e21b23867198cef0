"""The prompts of a build: what is learnt from, what is measured on, and what is raced on."""

import json
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.core.errors import UserError
from drafthead.core.storage.files import json_lines, write_text
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.distillation.dialogue import user_turns
from drafthead.train.prompts.tasks import write_prompts

FEWEST = 12  # prompts of which some can be held out
PASSAGES = 4  # of a prompt about texts, at most
ABOUT = 4  # one prompt of so many is about texts
Row = dict[str, Any]


class PromptFiles:
    """The files of prompts in a build's folder."""

    def __init__(self, folder: Path):
        self.train = folder / "train_prompts.jsonl"  # to learn to draft answers to
        self.held_out = folder / "held_out_prompts.jsonl"  # to measure the head on while it learns
        self.test = folder / "test_prompts.jsonl"  # for the race, and nothing else
        self.invented = folder / "invented.jsonl"  # what the target wrote: the held-out ones first


@dataclass(frozen=True)
class HeldOut:
    """Numbers of prompts that are held out to measure on, and for the race."""

    measured: int
    raced: int

    @classmethod
    def of(cls, minutes: float, prompts: int | None) -> "HeldOut":
        """The numbers for a build of so many minutes, of so many prompts if they are given."""
        measured, raced = (48, 12) if minutes < 15 else (96, 24)
        if prompts is None:
            return cls(measured, raced)
        if prompts < FEWEST:
            raise UserError(f"{prompts} prompts are too few to hold some out: give {FEWEST}")
        return cls(min(measured, max(4, prompts // 8)), min(raced, max(2, prompts // 16)))

    @property
    def both(self) -> int:
        """All that are held out."""
        return self.measured + self.raced


def part_given(
    sources: Sequence[str], minutes: float, seed: int, files: PromptFiles
) -> tuple[int, list[str]]:
    """Part the prompts of some files into those of a build.

    Returns how many there are to learn from, and a sentence about those that are left out, as they
    go on with what another model has done. Prompts that are the same go together. Raises UserError
    for too few of them.
    """
    rows: dict[str, Row] = {}
    left_out: dict[str, UnusableRowError] = {}
    for found in (found for source in sources for found in read_conversations(source)):
        name = json.dumps(found.messages)
        try:
            user_turns(found)
            rows[name] = row_of(found, f"given-{len(rows)}")
        except UnusableRowError as error:
            left_out[name] = error
    given = list(rows.values())
    said = [
        f"{len(left_out)} of {len(rows) + len(left_out)} prompts are left out: {error}"
        for error in [*left_out.values()][:1]
    ]
    random.Random(f"build-{seed}").shuffle(given)
    held = HeldOut.of(minutes, len(given))
    write_rows(files.test, given[: held.raced])
    write_rows(files.held_out, given[held.raced : held.both])
    write_rows(files.train, given[held.both :])
    return len(given) - held.both, said


def row_of(conversation: Conversation, name: str) -> Row:
    """A prompt as a row: all turns of the user, what was answered to them left out."""
    messages = [m for m in conversation.messages if m["role"] != "assistant"]
    row: Row = {"id": name, "messages": messages}
    if conversation.category is not None:
        row["category"] = conversation.category
    arguments = dict(conversation.template_arguments)
    row |= {key: arguments.pop(key) for key in ("tools", "documents") if key in arguments}
    return row | ({"chat_template_kwargs": arguments} if arguments else {})


def part_invented(files: PromptFiles, held: HeldOut) -> None:
    """Hold out the first of the invented prompts."""
    rows = read_rows(files.invented)
    write_rows(files.test, rows[: held.raced])
    write_rows(files.held_out, rows[held.raced : held.both])


def add_about_texts(prompts: Path, answers: Path, seed: int) -> int:
    """Add prompts about the texts in some answers to a file of prompts; how many.

    None where enough are there, or where the answers are too short to ask about.
    """
    rows, about = read_rows(prompts), prompts.with_name(f"about_{prompts.name}")
    there = sum(row["id"].startswith("about-") for row in rows)
    number = (len(rows) - there) // (ABOUT - 1) - there
    about.unlink(missing_ok=True)
    if number > 0:
        with suppress(UserError):  # too few answers are long enough
            write_prompts(str(answers), None, number, seed, PASSAGES, about)
    added = read_rows(about)
    about.unlink(missing_ok=True)
    write_rows(prompts, [*rows, *added])
    return len(added)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, or none."""
    return [*json_lines(path)]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows; a crash leaves the old file or the new one."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
