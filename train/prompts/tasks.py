"""Prompts about texts: summaries, translations, questions with their context.

Invented messages are short, and a head that has seen nothing else drafts badly after long prompts.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.train.data.conversations import Conversation, iter_conversations
from drafthead.train.prompts.message_filter import repeated_share
from drafthead.train.run.config import one_line

LEAST_WORDS, MOST_WORDS = 50, 260  # of a text
GREATEST_REPEATED = 0.15  # share of runs of three words of a text that occurred before in it
SENTENCES = 3  # of an opening, at most
QUESTION_LETTERS = 300  # of a question, at most
FEWEST_PASSAGES = 3  # of a prompt about many texts
TASKS = Path(str(files("drafthead.configs") / "prompts" / "tasks.yaml"))
NAMES = ("text", "other", "passages", "opening", "question")


@dataclass(frozen=True)
class SourceText:
    """A text that may be asked about, and the message that it answered."""

    words: list[str]
    question: str


def known_names_only(template: str) -> str:
    """The template itself; ValueError where it cannot be filled in."""
    try:
        template.format_map(dict.fromkeys(NAMES, ""))
    except (ValueError, LookupError, AttributeError) as error:
        names = ", ".join(f"{{{name}}}" for name in NAMES)
        raise ValueError(f"a task may name {names} and nothing else ({error!r})") from error
    return template


Templates = Annotated[
    tuple[Annotated[str, AfterValidator(known_names_only)], ...], Field(min_length=1)
]


@validated(frozen=True, config=ConfigDict(extra="forbid"))
class Tasks:
    """Tasks that are asked of texts, as templates for `str.format`."""

    about_one: Templates
    about_two: Templates
    about_many: Templates

    @classmethod
    def read(cls, path: Path) -> "Tasks":
        """The templates of a YAML file; UserError when it holds anything else."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            return TypeAdapter(cls).validate_python(content)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read as YAML: {one_line(error)}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            reason = first["msg"].removeprefix("Value error, ")
            raise UserError(
                f"{path}: {place}: {reason} (wanted: lists of texts about_one, about_two "
                f"and about_many, found: {first['input']!r:.80})"
            ) from error


def texts_of(conversations: Iterable[Conversation]) -> list[SourceText]:
    """The last answers that are long enough to ask about and do not repeat themselves."""
    texts: list[SourceText] = []
    for conversation in conversations:
        *_, asked, answer = [None, None, *conversation.messages]
        if asked is None or answer is None or answer["role"] != "assistant":
            continue
        words = answer["content"].split(" ")[:MOST_WORDS]
        if len(words) >= LEAST_WORDS and repeated_share(words) <= GREATEST_REPEATED:
            texts.append(SourceText(words, asked["content"][:QUESTION_LETTERS]))
    return texts


def prompts_about(
    texts: list[SourceText], tasks: Tasks, number: int, seed: int, most_passages: int
) -> Iterator[str]:
    """`number` prompts, in turn about two texts, about many and about one.

    A seed names the prompts. Raises UserError when there are no two texts.
    """
    if len(texts) < 2:
        raise UserError(
            f"{len(texts)} answers have {LEAST_WORDS} words and more and do not repeat themselves: "
            "at least 2 are needed"
        )
    chance = random.Random(f"tasks-{seed}")
    templates = (tasks.about_two, tasks.about_many, tasks.about_one)
    order = list(texts)
    for place in range(number):
        if place % len(order) == 0:
            chance.shuffle(order)
        text = order[place % len(order)]
        yield chance.choice(templates[place % 3]).format(
            text=shortened(text, chance),
            other=shortened(chance.choice(texts), chance),
            passages=passages(text, texts, most_passages, chance),
            opening=opening(text, chance.randint(1, SENTENCES)),
            question=text.question,
        )


def passages(text: SourceText, texts: list[SourceText], most: int, chance: random.Random) -> str:
    """A text somewhere among others, all with numbers, as a retriever would hand them over."""
    count = chance.randint(FEWEST_PASSAGES, most)
    chosen = [chance.choice(texts) for _ in range(count - 1)]
    chosen.insert(chance.randrange(count), text)
    return "\n\n".join(
        f"Passage {number}: {shortened(passage, chance)}"
        for number, passage in enumerate(chosen, 1)
    )


def shortened(text: SourceText, chance: random.Random) -> str:
    """A text of random length, whole sentences where it has any."""
    words = text.words[: chance.randint(LEAST_WORDS, MOST_WORDS)]
    cut = " ".join(words)
    return cut[: cut.rfind(".") + 1] or cut


def opening(text: SourceText, sentences: int) -> str:
    """The first sentences of a text."""
    return ". ".join(" ".join(text.words).split(". ")[:sentences]).rstrip(".") + "."


def write_prompts(
    source: str, tasks: Path | None, number: int, seed: int, most_passages: int, output: Path
) -> int:
    """Write so many prompts about the answers in a source, by TASKS or others; how many texts.

    Raises UserError when the file exists, and as `prompts_about`.
    """
    if output.exists():
        raise UserError(f"{output} exists: choose another file")
    if most_passages < FEWEST_PASSAGES:
        raise UserError(f"--passages must be at least {FEWEST_PASSAGES}, got {most_passages}")
    texts = texts_of(iter_conversations(source))
    prompts = prompts_about(texts, Tasks.read(tasks or TASKS), number, seed, most_passages)
    rows = [{"id": f"about-{seed}-{n}", "prompt": prompt} for n, prompt in enumerate(prompts)]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(texts)
