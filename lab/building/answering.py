"""The target's part of a build: prompts that it invents, and its answers."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.infer import Decoder
from drafthead.infer.timing.machine import free_memory
from drafthead.lab.building.budget import (
    AT_ONCE,
    HELD_OUT,
    INVENTING,
    LEAST,
    Speeds,
    division,
)
from drafthead.lab.building.choices import Choices
from drafthead.lab.building.folder import BuildFolder, Facts
from drafthead.lab.building.prompts import (
    HeldOut,
    PromptFiles,
    Row,
    add_about_texts,
    part_given,
    part_invented,
    read_rows,
    write_rows,
)
from drafthead.lab.building.view import View
from drafthead.train.data.conversations import read_conversations
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.prompts.invention import TooFewMessagesError, invent
from drafthead.train.prompts.message_source import MessageSource
from drafthead.train.settings import DistillSettings, InventSettings

BATCH, MOST_BATCH = 32, 256  # prompts answered at a time: at least, and on a large GPU
# Of a row's first columns, that there may be at once: a long row has twice as many, and beside a
# cache in use there may be two that it has left, and the one that it moves into.
COPIES = 2 * 4
WINDOWS = 8  # that the time for answers and learning has room for, at least


def rows_at_once(decoder: Decoder) -> int:
    """The number of prompts that a target answers at a time.

    Where passes are recorded, on a GPU, it is the largest power of two whose caches fit into the
    free memory.
    """
    target = decoder.target
    if not target.memory.is_recorded:
        return BATCH
    decoder.generate([[0]], max_new_tokens=1)  # makes the smallest cache, and records nothing
    fit = free_memory(target.device) // (COPIES * target.memory.most_in_use)
    return 1 << (min(max(fit, BATCH), MOST_BATCH).bit_length() - 1)


class BuildAnswers:
    """Prompts and answers of a build."""

    def __init__(self, choices: Choices, folder: BuildFolder):
        self.choices, self.folder = choices, folder
        self.files = PromptFiles(folder.path)
        self.answers, self.held_out = folder.path / "answers.jsonl", folder.path / "held_out.jsonl"
        self.loaded: Decoder | None = None

    def decoder(self) -> Decoder:
        """The target, loaded once for all that it answers."""
        if self.loaded is None:
            chosen = self.choices
            target = load_decoder_only(chosen.target, chosen.dtype, chosen.device)
            self.loaded = Decoder.from_pretrained(target, compile=chosen.compile)
        return self.loaded

    @cached_property
    def rows(self) -> int:
        """Prompts answered at a time; a folder keeps to what it began with."""
        return self.folder.once("rows", self._found_rows)

    def _found_rows(self) -> int:
        self.files.invented.unlink(missing_ok=True)  # of a build with other choices
        return rows_at_once(self.decoder())

    def forget(self) -> None:
        """Give the target's memory back, to other processes as well."""
        self.loaded = None
        gc.collect()
        torch.cuda.empty_cache()

    def part_prompts(self) -> Facts:
        """Prompts, parted."""
        chosen = self.choices
        if chosen.prompts:
            given, said = part_given(chosen.prompts, chosen.minutes, chosen.seed, self.files)
            return {"given": given, "said": said}
        held = HeldOut.of(chosen.minutes, None)
        try:
            self._invent(held.both, 60 * chosen.minutes * INVENTING)
        except TooFewMessagesError as error:
            raise UserError(f"{error}: give prompts of your users, with --prompts FILE") from error
        part_invented(self.files, held)
        return {
            "held": held.both,
            "by_hand": chosen.command("data invent", {
                "compile": chosen.compile, "seed": chosen.seed, "number": held.both,
                "batch_size": 2 * self.rows, "output": self.files.invented,
            }),
        }  # fmt: skip

    def _invent(self, number: int, seconds: float) -> None:
        """Have so many messages of users in so many seconds.

        Raises UserError where the target cannot write any, TooFewMessagesError where it is slow.
        """
        chosen = self.choices
        # Without `compile`: a build that was given more time may compile, and goes on here.
        settings = InventSettings(
            chosen.target, seed=chosen.seed, dtype=chosen.dtype,
            batch_size=2 * self.rows,  # what is left of a batch is drawn again for the next window
        )  # fmt: skip
        try:
            source = MessageSource(self.decoder(), settings)
        except UserError as error:
            raise UserError(f"{error}; or give prompts, with --prompts FILE") from error
        invent(source, self.files.invented, number, seconds=seconds)

    def _distil(self, prompts: Path, output: Path, limit: int | None) -> DistillReport:
        """The target's answers to the first prompts of a file, those that are there kept."""
        settings = DistillSettings(
            self.choices.target, str(prompts), dtype=self.choices.dtype,
            max_new_tokens=self.choices.max_new_tokens, batch_size=self.rows,
        )  # fmt: skip
        file = DistilledFile(output, settings)
        file.check()
        rows = read_conversations(prompts, None, limit)
        with file:
            return distill(DecoderSource(self.decoder()), rows, file)

    def _by_hand(self, prompts: Path, output: Path, rows: int) -> str:
        chosen = self.choices
        return chosen.command("data distill", {
            "compile": chosen.compile, "limit": rows, "batch_size": self.rows,
            "max_new_tokens": chosen.max_new_tokens, "prompts": prompts, "output": output,
        })  # fmt: skip

    def _distil_until(self, ends: float, prompts: Path, output: Path) -> DistillReport:
        """Answers to as many of a file's first prompts as there is time for, and at least LEAST."""
        total = len(read_rows(prompts))
        wanted = min(total, max(LEAST, len(read_rows(output))))
        while True:
            began = time.monotonic()
            try:
                report = self._distil(prompts, output, wanted)
            except UserError:  # none of the first ones can be asked, or fits
                if wanted == total:
                    raise
                wanted = min(total, 2 * wanted)
                continue
            each = (time.monotonic() - began) / max(1, report.written)
            more = int((ends - time.monotonic()) / each) if report.written else LEAST
            if wanted == total or more < 1:
                return report
            wanted = min(total, wanted + more)

    def answer_held_out(self) -> Facts:
        """Answers to held-out prompts; where prompts are invented, also about these answers."""
        self.decoder()
        began, files = time.monotonic(), self.files
        ends = began + 60 * self.choices.minutes * HELD_OUT
        found = self._distil_until(ends, files.held_out, self.held_out)
        if not self.choices.prompts:
            add_about_texts(files.test, self.held_out, seed=-1)
            if add_about_texts(files.held_out, self.held_out, seed=-2):
                found = self._distil_until(ends, files.held_out, self.held_out)
        lengths, asked = found.statistics.lengths, len(read_rows(files.held_out))
        there = found.statistics.rows
        return {
            "said": [f"answers to {there} of {asked} held-out prompts"],
            "answers": there,
            "length": sum(lengths) / len(lengths),
            "tokens_per_s": sum(lengths) / (time.monotonic() - began),
            "by_hand": self._by_hand(files.held_out, self.held_out, there),
        }

    def answer(self, seconds_left: Callable[[], float], view: View) -> Facts:
        """Answers, window after window, for as long as more of them teach more than learning."""
        # Without a head all of the time is for the table of n-grams.
        trains = self.folder.fact("plan", "trains")
        learning, rereading = [
            self.folder.fact("plan", name) if trains else AT_ONCE
            for name in ("learning", "rereading")
        ]
        answering = self.folder.fact("held out", "tokens_per_s")
        length = self.folder.fact("held out", "length")
        while True:
            began, rows = time.monotonic(), read_rows(self.answers)
            there, tokens = len(rows), tokens_of(rows)
            left = max(1.0, seconds_left())
            best = division(left, Speeds(answering, learning, rereading), tokens)
            missing = best.answers - tokens
            view.expected["answers"] = view.seconds + missing / answering
            again = max(0.0, best.learnt - best.answers)
            first = (best.learnt - again) / learning
            view.expected["train"] = first + again / rereading if trains else 0
            if there and missing < length * self.rows / 2:
                break
            window = min(missing, answering * left / WINDOWS) / length
            whole = self.rows * max(1, int(window / self.rows))
            wanted = max(LEAST, there + min(whole, int(left * answering / length)))
            wanted = min(wanted, self._have_prompts(wanted, INVENTING * left))
            if wanted <= there:
                break
            report = self._distil(self.files.train, self.answers, wanted)
            if not report.written:
                break
            answering = report.tokens / (time.monotonic() - began)
        return {
            "answers": there, "tokens": tokens, "tokens_per_s": answering,
            "said": [f"{there:,} answers, {tokens:,} tokens"],
            "by_hand": self._by_hand(self.files.train, self.answers, there),
        }  # fmt: skip

    def _have_prompts(self, number: int, seconds: float) -> int:
        """Return how many prompts there are to learn from, after so many were asked for.

        Invented ones come with others about the texts that the target has written until then.
        """
        if not self.choices.prompts:
            rows, held = read_rows(self.files.train), self.folder.fact("prompts", "held")
            if rows and self.answers.exists():
                add_about_texts(self.files.train, self.answers, seed=len(rows))
                rows = read_rows(self.files.train)
            missing = number - len(rows)
            if missing > 0:
                own = held + sum(row["id"].startswith("invented-") for row in rows)
                with suppress(TooFewMessagesError):  # what there is will do
                    self._invent(own + missing, seconds)
                write_rows(self.files.train, [*rows, *read_rows(self.files.invented)[own:]])
        return len(read_rows(self.files.train))


def tokens_of(rows: Sequence[Row]) -> int:
    """Tokens of the answers in some rows."""
    return sum(len(one["answer"]) for row in rows for one in row["token_ids"])
