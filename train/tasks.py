"""Prompts about texts: summaries, translations, questions with their context.

Invented messages are short, and a head that has seen nothing else drafts badly after long prompts.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import yaml

from drafthead.heads.errors import UserError
from drafthead.train.conversations import Conversation
from drafthead.train.message_filter import repeated_share

LEAST_WORDS, MOST_WORDS = 50, 260  # of a text
GREATEST_REPEATED = 0.15  # share of runs of three words of a text that occurred before in it
SENTENCES = 3  # of an opening, at most
QUESTION_LETTERS = 300  # of a question, at most
NAMES = {"text", "other", "opening", "question"}


@dataclass(frozen=True)
class Text:
    """A text that may be asked about, and the message that it answered."""

    words: list[str]
    question: str


@dataclass(frozen=True)
class Tasks:
    """What is asked of texts, as templates for `str.format`."""

    about_one: tuple[str, ...]
    about_two: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "Tasks":
        """The templates of a YAML file; UserError when it holds anything else."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            lists = [content[name] for name in ("about_one", "about_two")]
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no file of tasks, lists about_one and about_two of texts: {error}"
            ) from error
        for template in (entry for entries in lists for entry in entries):
            check_template(path, template)
        return cls(*(tuple(entries) for entries in lists))


def check_template(path: Path, template: object) -> None:
    """Raise UserError for what is no template with the known names."""
    try:
        fields = {name for _, name, _, _ in Formatter().parse(str(template)) if name is not None}
    except ValueError as error:
        raise UserError(f"{path}: {template!r} is no template ({error})") from error
    if unknown := fields - NAMES or not isinstance(template, str):
        raise UserError(
            f"{path}: {template!r} must be a text with {', '.join(f'{{{n}}}' for n in NAMES)}, "
            f"and has {unknown}"
        )


def texts_of(conversations: Iterable[Conversation]) -> list[Text]:
    """The last answers that are long enough to ask about and do not repeat themselves."""
    texts: list[Text] = []
    for conversation in conversations:
        *_, asked, answer = [None, None, *conversation.messages]
        if asked is None or answer is None or answer["role"] != "assistant":
            continue
        words = answer["content"].split(" ")[:MOST_WORDS]
        if len(words) >= LEAST_WORDS and repeated_share(words) <= GREATEST_REPEATED:
            texts.append(Text(words, asked["content"][:QUESTION_LETTERS]))
    return texts


def prompts_about(texts: list[Text], tasks: Tasks, number: int, seed: int) -> Iterator[str]:
    """`number` prompts, every third of them about two texts; the same for the same seed.

    Raises UserError when there are no two texts.
    """
    if len(texts) < 2:
        raise UserError(
            f"{len(texts)} answers have {LEAST_WORDS} words and more and do not repeat themselves: "
            "at least 2 are needed"
        )
    chance = random.Random(f"tasks-{seed}")
    order = list(texts)
    for place in range(number):
        if place % len(order) == 0:
            chance.shuffle(order)
        text, other = order[place % len(order)], chance.choice(texts)
        template = chance.choice(tasks.about_one if place % 3 else tasks.about_two)
        yield template.format(
            text=shortened(text, chance),
            other=shortened(other, chance),
            opening=opening(text, chance.randint(1, SENTENCES)),
            question=text.question,
        )


def shortened(text: Text, chance: random.Random) -> str:
    """A text of random length, whole sentences where it has any."""
    words = text.words[: chance.randint(LEAST_WORDS, MOST_WORDS)]
    cut = " ".join(words)
    return cut[: cut.rfind(".") + 1] or cut


def opening(text: Text, sentences: int) -> str:
    """The first sentences of a text."""
    return ". ".join(" ".join(text.words).split(". ")[:sentences]).rstrip(".") + "."
