"""`drafthead build --continue`: a head and its table go on with new answers, and old races new."""

import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

import typer
import yaml

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_json
from drafthead.heads.formats import read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.checkpoint import local_copy
from drafthead.heads.formats.drafthead import is_own_folder
from drafthead.lab.building.choices import Choices
from drafthead.lab.building.folder import RECORD, BuildFolder
from drafthead.lab.building.prompts import read_rows, row_of, write_rows
from drafthead.lab.learning_curve import in_words
from drafthead.lab.reports.comparison import fastest
from drafthead.scripts.building.stages import (
    LEAST_TRAINING,
    RACED_TOKENS,
    Building,
    best_head,
    changed,
    drafts_of,
)
from drafthead.train.data.conversations import read_conversations
from drafthead.train.data.row_sources import rows_of
from drafthead.train.run.folder import BEST_BY, BEST_FOLDER
from drafthead.train.run.starting_config import write_starting_config

HELD = 8  # one prompt of so many is held out
FEWEST, MOST_HELD, RACED = 16, 64, 8  # prompts: there must be, held out, and raced on
LEARNING = 0.7  # of the time; the rest is for measuring and the race


@dataclass
class DraftResult:
    """A drafter, and how it has done on answers that nothing has learnt from."""

    name: str
    drafts: list[str]  # as `--draft` names them
    tau: float = 0.0  # of the head
    speedup: float = 0.0  # of its fastest way of decoding over plain decoding
    fastest: list[str] = field(default_factory=list)


class Tuning(Building):
    """A build whose answers are in a file, and whose head starts from the one before."""

    def __init__(self, choices: Choices, before: Path, data: Path, output: Path):
        """`before` is a folder of `build`, or a head: a folder, a shipped one or of the hub."""
        super().__init__(choices, BuildFolder(output))
        self.before, self.data = before, data

    def run(self) -> None:
        """Tune, measure and race; prints what is better, and how a server gets it."""
        head, began = self._old_head(), time.monotonic()
        if self.path.exists():
            raise UserError(f"{self.path} is there already: choose another --output")
        self._part()
        self._count()
        was = DraftResult("old", [str(head), *self._table(self.before), "lookup"])
        was.tau = self.measure(head, self.path / "before.json", save=False)
        self._train(head, began)
        tuned = best_head(self.trained)
        now = DraftResult("new", [str(tuned), *self._table(self.path), "lookup"])
        now.tau = self.measure(tuned, self.path / "after.json", save=True)
        for each in (was, now):
            best = fastest(
                self.race_with(each.drafts, RACED, RACED_TOKENS, self.path / f"race_{each.name}")
            )[0]
            each.speedup, each.fastest = best.speedup, drafts_of(best.mode, each.drafts)
        self._tell(was, now, in_words(time.monotonic() - began))

    def _tell(self, was: DraftResult, now: DraftResult, took: str) -> None:
        """Print and write what is better."""
        typer.echo(
            f"{took}; held-out answers in {self.source.held_out}, tau at {BEST_BY} nodes, by the "
            "head alone"
        )
        for each in (was, now):
            typer.echo(f"{each.name}: tau {each.tau:.2f}, {each.speedup:.2f} times plain decoding")
        best = max(was, now, key=lambda each: each.speedup)
        found = {each.name: vars(each) for each in (was, now)} | {"better": best.name}
        write_json(self.path / "tuning.json", found)
        named = " ".join(f"--draft {quote(draft)}" for draft in best.fastest)
        body = json.dumps({"draft": best.fastest})
        typer.echo(
            f"the {best.name} drafts are better: {named}\n"
            "a server that runs with --admin-key KEY --drafts-from FOLDER gets them by\n"
            '  curl http://HOST:PORT/v1/drafts -H "Authorization: Bearer KEY" '
            f"-H 'Content-Type: application/json' -d {quote(body)}"
        )

    def _old_head(self) -> Path:
        """The head to go on with; raises UserError where there is none of our format."""
        build, head = self.before / "head", local_copy(self.before)
        found = next(filter(is_own_folder, (build / BEST_FOLDER, build, head)), None)
        if found is None:
            raise UserError(f"{self.before} holds no head to go on with: give a build, or a head")
        record = self.before / RECORD
        if record.exists():
            own = yaml.safe_load(record.read_text(encoding="utf-8"))["choices"]["target"]
            if own != self.choices.target:
                raise UserError(f"{self.before} is for --target {own}, not {self.choices.target}")
        return found

    @staticmethod
    def _table(folder: Path) -> list[str]:
        """The table of n-grams of a build, if there is one."""
        path = folder / "ngrams"
        return [f"ngrams:{path}"] if path.exists() else []

    def _part(self) -> None:
        """Part the rows into answers to learn from and held-out ones, with the prompts of these.

        Answers to the same prompt go together. Raises UserError for too few.
        """
        by_prompt = defaultdict(list)
        rows = {f"{row.file}:{row.number}": row.content for row in rows_of(str(self.data))}
        for found in read_conversations(self.data):  # which leaves out rows that teach nothing
            if found.tokens is None:
                raise UserError(f"{found.where} has no token ids: use rows of serve --record")
            prompt = tuple(found.tokens.answers[0].prompt)
            by_prompt[prompt].append((rows[found.source], found))
        if len(by_prompt) < FEWEST:
            raise UserError(
                f"{self.data} has answers to {len(by_prompt)} prompts: {FEWEST} are needed"
            )
        groups = list(by_prompt.values())
        random.Random(f"tuning-{self.choices.seed}").shuffle(groups)
        count = min(MOST_HELD, max(4, len(groups) // HELD))
        self.path.mkdir(parents=True)
        for file, part in (
            (self.source.answers, groups[count:]),
            (self.source.held_out, groups[:count]),
        ):
            write_rows(file, [row for group in part for row, _ in group])
        asked = [row_of(group[0][1], f"test-{n}") for n, group in enumerate(groups[:count])]
        write_rows(self.source.files.test, asked)

    def _count(self) -> None:
        """The table of n-grams of all answers, those of the build before among them."""
        every = self.path / "all_answers.jsonl"
        earlier = read_rows(self.before / "answers.jsonl")
        write_rows(every, [*earlier, *read_rows(self.source.answers)])
        self.index(every)
        every.unlink()

    def _train(self, head: Path, began: float) -> None:
        """Train as a build does that starts from the head, for what is left of the time."""
        family = read_foreign(head, TargetFacts())[1].family
        self.choices = replace(self.choices, family=family, init_from=str(head))
        write_starting_config(family, self.choices.target, self.config)
        left = 60 * self.choices.minutes * LEARNING - (time.monotonic() - began)
        self.learn(changed(self.usual(), "train.max_minutes", max(left, LEAST_TRAINING) / 60))
