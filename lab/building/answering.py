"""The target's part of a build: prompts that it invents, and its answers."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from drafthead.heads.errors import UserError
from drafthead.heads.target.any_target import load_decoder_only
from drafthead.infer import Decoder
from drafthead.lab.building.budget import AT_ONCE, Speeds, division
from drafthead.lab.building.folder import BuildFolder, Choices, Facts
from drafthead.lab.building.prompts import (
    HeldOut,
    PromptFiles,
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
from drafthead.train.distillation.distilled_file import DistilledFile, DistillSettings
from drafthead.train.prompts.invention import invent
from drafthead.train.prompts.message_source import InventSettings, MessageSource

BATCH, WINDOW = 32, 8  # prompts answered at a time; batches that are written together, at most
WINDOWS = 8  # that the time for answers and learning has room for, at least


class Answering:
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

    def forget(self) -> None:
        """Give the target's memory back."""
        self.loaded = None
        gc.collect()

    def part_prompts(self) -> Facts:
        """Prompts, parted."""
        chosen = self.choices
        if chosen.prompts:
            return {"given": part_given(chosen.prompts, chosen.minutes, chosen.seed, self.files)}
        held = HeldOut.of(chosen.minutes, None)
        self._invent(held.both)
        part_invented(self.files, held)
        return {
            "held": held.both,
            "by_hand": f"drafthead data invent {chosen.model_options} --seed {chosen.seed} "
            f"{'--compile ' * chosen.compile}--number {held.both} "
            f"--batch-size {2 * BATCH} --output {quote(str(self.files.invented))}",
        }

    def _invent(self, number: int) -> None:
        """Have so many messages of users; raises UserError where the target cannot write any."""
        chosen = self.choices
        settings = InventSettings(
            chosen.target, seed=chosen.seed, dtype=chosen.dtype, compile=chosen.compile,
            batch_size=2 * BATCH,  # a batch that was not used up is drawn again for the next window
        )  # fmt: skip
        try:
            source = MessageSource(self.decoder(), settings)
        except UserError as error:
            raise UserError(f"{error}; or give prompts, with --prompts FILE") from error
        invent(source, self.files.invented, number)

    def _distil(self, prompts: Path, output: Path, limit: int | None) -> DistillReport:
        """The target's answers to the first prompts of a file, those that are there kept."""
        settings = DistillSettings(
            self.choices.target, str(prompts), self.choices.max_new_tokens,
            dtype=self.choices.dtype, batch_size=BATCH,
        )  # fmt: skip
        file = DistilledFile(output, settings, False, None)
        file.check()
        rows = read_conversations(prompts, None, limit)
        with file:
            return distill(DecoderSource(self.decoder()), rows, file)

    def _by_hand(self, prompts: Path, output: Path, rows: int) -> str:
        return (
            f"drafthead data distill {self.choices.model_options} --limit {rows} "
            f"--batch-size {BATCH} --max-new-tokens {self.choices.max_new_tokens} "
            f"--prompts {quote(str(prompts))} --output {quote(str(output))}"
        )

    def answer_held_out(self) -> Facts:
        """Answers to the held-out prompts; where prompts are invented, also about these answers."""
        began, files = time.monotonic(), self.files
        found = self._distil(files.held_out, self.held_out, None)
        if not self.choices.prompts:
            add_about_texts(files.test, self.held_out, seed=-1)
            if add_about_texts(files.held_out, self.held_out, seed=-2):
                found = self._distil(files.held_out, self.held_out, None)
        lengths = found.statistics.lengths
        return {
            "answers": found.statistics.rows,
            "length": sum(lengths) / len(lengths),
            "tokens_per_s": sum(lengths) / (time.monotonic() - began),
            "by_hand": self._by_hand(files.held_out, self.held_out, found.statistics.rows),
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
            began, there = time.monotonic(), len(read_rows(self.answers))
            window = answering * seconds_left() / WINDOWS / length
            wanted = there + BATCH * max(1, min(WINDOW, int(window / BATCH)))
            wanted = min(wanted, self._have_prompts(wanted))
            if wanted <= there:
                break
            report = self._distil(self.files.train, self.answers, wanted)
            if not report.written:
                break
            answering = report.tokens / (time.monotonic() - began)
            tokens = sum(report.statistics.lengths)
            best = division(seconds_left(), Speeds(answering, learning, rereading), tokens)
            view.expected["answers"] = view.seconds + (best.answers - tokens) / answering
            again = max(0.0, best.learnt - best.answers)
            first = (best.learnt - again) / learning
            view.expected["train"] = first + again / rereading if trains else 0
            if best.answers - tokens < length * report.written / 2:
                break
        rows = read_rows(self.answers)
        tokens = sum(len(one["answer"]) for row in rows for one in row["token_ids"])
        return {
            "answers": len(rows), "tokens": tokens, "tokens_per_s": answering,
            "said": [f"{len(rows):,} answers, {tokens:,} tokens"],
            "by_hand": self._by_hand(self.files.train, self.answers, len(rows)),
        }  # fmt: skip

    def _have_prompts(self, number: int) -> int:
        """How many prompts there are to learn from, after so many were asked for.

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
                self._invent(own + missing)
                write_rows(self.files.train, [*rows, *read_rows(self.files.invented)[own:]])
        return len(read_rows(self.files.train))
