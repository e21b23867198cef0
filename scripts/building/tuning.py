"""`drafthead build --continue`: a head and its table go on with new answers, and old races new."""

import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

import torch
import typer
import yaml

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_json, write_text
from drafthead.heads.formats.checkpoint import local_copy
from drafthead.heads.formats.drafthead import is_own_folder
from drafthead.heads.formats.files import read_json
from drafthead.lab.building.folder import RECORD
from drafthead.lab.building.prompts import read_rows, row_of, write_rows
from drafthead.lab.learning_curve import in_words
from drafthead.lab.races.race import PLAIN
from drafthead.lab.races.record import drafts_by_name
from drafthead.scripts import compare, options
from drafthead.scripts.building.stages import RACED_TOKENS, forget_accelerate
from drafthead.scripts.data import index
from drafthead.scripts.head import evaluate
from drafthead.train.data.conversations import read_conversations
from drafthead.train.run.config import load_run_config, written_override
from drafthead.train.run.folder import BEST_BY, BEST_FOLDER
from drafthead.train.train_heads import train

HELD = 8  # one prompt of so many is held out
FEWEST, MOST_HELD, RACED = 16, 64, 8  # prompts: there must be, held out, and raced on
CPU_ROW, CPU_UNROLLED = 512, 3  # tokens of a row, steps that training unrolls: on a processor
LEARNING = 0.7  # of the time; the rest is for measuring and the race


@dataclass
class Drafted:
    """What drafts, and how it has done on answers that nothing has learnt from."""

    name: str
    drafts: list[str]  # as `--draft` names them
    tau: float = 0.0  # of the head
    speedup: float = 0.0  # of its fastest way of decoding over plain decoding
    fastest: list[str] = field(default_factory=list)


@dataclass
class Tuning:
    """A build's drafts, or a head, that go on with the rows of a file."""

    model: options.Model
    before: Path  # a folder of `build`, or a head: a folder, a shipped one or of the hub
    data: Path
    output: Path
    minutes: float
    compile: bool | None
    seed: int

    def run(self) -> None:
        """Tune, measure and race; prints what is better, and how a server gets it."""
        head = self._old_head()
        settings = read_json(head / "config.json").get("provenance", {}).get("settings")
        if not isinstance(settings, dict):
            raise UserError(f"{head} does not say how it was trained: use train.init_from by hand")
        if self.output.exists():
            raise UserError(f"{self.output} is there already: choose another --output")
        began = time.monotonic()
        train_file, held, prompts = self._part()
        self._count(train_file)
        was = Drafted("old", [str(head), *self._table(self.before), "lookup"])
        was.tau = self._measure(head, held, save=False)
        tuned = self._train(head, settings, train_file, held, began)
        now = Drafted("new", [str(tuned), *self._table(self.output), "lookup"])
        now.tau = self._measure(tuned, held, save=True)
        for each in (was, now):
            self._race(each, prompts)
        took = in_words(time.monotonic() - began)
        typer.echo(f"{took}; held-out answers in {held}, tau at {BEST_BY} nodes, by the head alone")
        for each in (was, now):
            typer.echo(f"{each.name}: tau {each.tau:.2f}, {each.speedup:.2f} times plain decoding")
        best = max(was, now, key=lambda each: each.speedup)
        found = {each.name: vars(each) for each in (was, now)} | {"better": best.name}
        write_json(self.output / "tuning.json", found)
        named = " ".join(f"--draft {quote(draft)}" for draft in best.fastest)
        body = json.dumps({"draft": best.fastest})
        typer.echo(
            f"the {best.name} drafts are better: {named}\n"
            "a server that runs gets them by\n"
            '  curl http://HOST:PORT/v1/drafts -H "Authorization: Bearer $DRAFTHEAD_API_KEY" '
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
            if own != self.model.target:
                raise UserError(f"{self.before} is for --target {own}, not {self.model.target}")
        return found

    @staticmethod
    def _table(folder: Path) -> list[str]:
        """The table of n-grams of a build, if there is one."""
        path = folder / "ngrams"
        return [f"ngrams:{path}"] if path.exists() else []

    def _part(self) -> tuple[Path, Path, Path]:
        """Files of answers to learn from and held-out ones, and of the prompts of these.

        Answers to the same prompt go together. Raises UserError for too few.
        """
        by_prompt = defaultdict(list)
        rows = read_rows(self.data)
        for row, found in zip(rows, read_conversations(self.data), strict=True):
            if found.tokens is None:
                raise UserError(f"{found.where} has no token ids: use rows of serve --record")
            by_prompt[tuple(found.tokens.answers[0].prompt)].append((row, found))
        if len(by_prompt) < FEWEST:
            raise UserError(
                f"{self.data} has answers to {len(by_prompt)} prompts: {FEWEST} are needed"
            )
        groups = list(by_prompt.values())
        random.Random(f"tuning-{self.seed}").shuffle(groups)
        count = min(MOST_HELD, max(4, len(groups) // HELD))
        self.output.mkdir(parents=True)
        paths = [self.output / f"{name}.jsonl" for name in ("answers", "held_out", "test_prompts")]
        write_rows(paths[0], [row for group in groups[count:] for row, _ in group])
        write_rows(paths[1], [row for group in groups[:count] for row, _ in group])
        asked = [row_of(group[0][1], f"test-{n}") for n, group in enumerate(groups[:count])]
        write_rows(paths[2], asked)
        return paths[0], paths[1], paths[2]

    def _count(self, train_file: Path) -> None:
        """The table of n-grams of all answers, those of the build before among them."""
        rows, earlier = read_rows(train_file), self.before / "answers.jsonl"
        every = self.output / "all_answers.jsonl"
        write_rows(every, [*read_rows(earlier), *rows])
        index.main(
            data=str(every), target=self.model.target, output=self.output / "ngrams",
            rows=options.Rows(),
        )  # fmt: skip
        every.unlink()

    def _measure(self, head: Path, held: Path, save: bool) -> float:
        """The head's tau on held-out answers."""
        output = self.output / ("after.json" if save else "before.json")
        evaluate.main(
            head=head, model=self.model, data=[str(held)], rows=options.Rows(), output=output,
            save_acceptance=save,
        )  # fmt: skip
        forget_accelerate()
        return float(read_json(output)["data"][str(held)]["tau_tree"][str(BEST_BY)])

    def _train(
        self, head: Path, settings: dict[str, dict[str, object]], train_file: Path, held: Path,
        began: float,
    ) -> Path:  # fmt: skip
        """The head after it has learnt, in the folder `head`: its own settings, other answers."""
        config, trained = self.output / "train.yaml", self.output / "head"
        left = 60 * self.minutes * LEARNING - (time.monotonic() - began)
        data = {
            "max_length": settings["data"]["max_length"],
            "train": str(train_file),
            "validation": str(held),
            "feature_folder": str(self.output / "features"),
        }
        own = settings["train"]
        lasting = {"max_minutes": max(left, 5.0) / 60, "seed": self.seed, "output": str(trained)}
        rows = {name: own[name] for name in ("batch_rows", "micro_batch_rows")}
        head_settings = dict(settings["head"])
        if self.model.device == "cpu" or not torch.accelerator.is_available():
            # As in a short build: a few small steps teach more than fewer large ones.
            rows = dict.fromkeys(rows, 2)
            data["max_length"] = min(int(str(data["max_length"])), CPU_ROW)
            if "ttt_steps" in head_settings:
                head_settings["ttt_steps"] = min(int(str(head_settings["ttt_steps"])), CPU_UNROLLED)
        sections = {
            "target": {"name": self.model.target, "dtype": self.model.dtype},
            "head": head_settings,
            "data": data,
            "optimizer": settings["optimizer"],
            "train": {**rows, **lasting, "mixed_precision": "auto", "init_from": str(head)},
        }
        write_text(config, yaml.safe_dump(sections, sort_keys=False))
        forget_accelerate()
        cpu = written_override("train.cpu", self.model.device == "cpu")
        if not train(load_run_config(config, [cpu])):
            raise KeyboardInterrupt
        forget_accelerate()
        best = trained / BEST_FOLDER
        return best if best.exists() else trained

    def _race(self, each: Drafted, prompts: Path) -> None:
        """All ways of decoding with some drafts, on held-out prompts."""
        terms = compare.Race(limit=RACED, rounds=1, max_new_tokens=RACED_TOKENS, seed=self.seed)
        output, drafting = self.output / f"race_{each.name}", options.Drafting(draft=each.drafts)
        compare.run_race(self.model, drafting, str(prompts), terms, self.compile, output)
        rows = read_json(output / "comparison.json")["rows"]
        plain = next(row for row in rows if row["mode"] == PLAIN)
        best = max((row for row in rows if row["tau"]), key=lambda row: row["speedup_hf"])
        each.speedup = best["speedup_hf"] / plain["speedup_hf"]
        kinds = drafts_by_name(each.drafts)
        parts = best["mode"].split(" + ")
        each.fastest = [str(kinds.get(part, part)) for part in parts if part != PLAIN]
