"""The stages of `drafthead build`: each is the work of another verb."""

import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from drafthead.heads.errors import UserError
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.files import read_json
from drafthead.heads.formats.loading import load_head, read_foreign
from drafthead.heads.formats.uploading import card
from drafthead.heads.storage.files import write_text
from drafthead.heads.target.any_target import tokenizer_named
from drafthead.heads.target.loading import vocabulary_of
from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import DEPTH, StoreLookup, load_table
from drafthead.lab.building.budget import (
    FEWEST_TOKENS,
    Speeds,
    division,
    measuring_seconds,
)
from drafthead.lab.building.folder import STAGES, BuildFolder, Choices
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
from drafthead.lab.learning_curve import in_words, what_more_would_bring
from drafthead.lab.planned_training import plan_training, run_trial
from drafthead.lab.races.race import PLAIN
from drafthead.lab.races.record import drafts_by_name
from drafthead.lab.reports.index import tokens_a_pass
from drafthead.lab.reports.run_page import comparison_section, run_page
from drafthead.lab.servers.export_for import METHODS, export_for
from drafthead.scripts import compare, options
from drafthead.scripts.data import index
from drafthead.scripts.explain import report, tree
from drafthead.scripts.head import evaluate
from drafthead.train.data.conversations import read_conversations
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.distilled_file import DistilledFile, DistillSettings
from drafthead.train.jobs.outputs import full_disk_named
from drafthead.train.prompts.invention import invent
from drafthead.train.prompts.message_source import InventSettings, MessageSource
from drafthead.train.run.config import RunConfig, load_run_config
from drafthead.train.run.folder import BEST_BY, BEST_FOLDER, EVALUATION_FILE, read_log, summarize
from drafthead.train.run.starting_config import write_starting_config
from drafthead.train.train_heads import train

logger = logging.getLogger(__name__)

BATCH, WINDOW = 32, 8  # prompts answered at a time; batches that are written together, at most
WINDOWS = 8  # that the time for answers and learning has room for, at least
FIRST_SHARES = (
    0.03,
    0.06,
    0.05,
    0.2,
    0.01,
    0.35,
    0.05,
    0.2,
    0.03,
    0.02,
)  # before anything is known
RACED_TOKENS = 128
Facts = dict[str, Any]


class Building:
    """A build at work."""

    def __init__(self, choices: Choices, folder: BuildFolder):
        self.choices, self.folder, self.path = choices, folder, folder.path
        self.files = PromptFiles(self.path)
        self.model = options.Model(
            target=choices.target, dtype=choices.dtype, device=choices.device
        )
        self.config, self.head_folder = self.path / "train.yaml", self.path / "head"
        self.answers, self.held_out = self.path / "answers.jsonl", self.path / "held_out.jsonl"
        self.ngrams, self.race_folder = self.path / "ngrams", self.path / "race"
        self.began = time.monotonic()
        self.loaded: Decoder | None = None

    # What is known before anything is done.

    def first_plan(self) -> str:
        """What will be made, and what it needs; raises UserError where it cannot fit."""
        self.config.unlink(missing_ok=True)
        write_starting_config(self.choices.family, self.choices.target, self.config)
        settings = self.fitting()
        plan = plan_training(self.config, settings, 1, None, None, False, has_data=False)
        disk = plan.disk.states + plan.disk.head
        free = disk_usage(self.path).free
        if free < disk:
            raise UserError(
                f"the head's files need {disk / 1e9:.1f} GB, and the disk of {self.path} has "
                f"{free / 1e9:.1f} GB: make room, or choose another --output"
            )
        changed = (
            f" with {' '.join(settings[len(self.usual()) :])}"
            if len(settings) > len(self.usual())
            else ""
        )
        return (
            f"{self.choices.family} for {self.choices.target} in "
            f"{in_words(60 * self.choices.minutes)}, into {self.path}: prompts, answers, a table "
            f"of n-grams, a head, a race, a report\ntraining{changed}: {plan.verdict()}; "
            f"{disk / 1e6:.0f} MB of disk"
        )

    def usual(self) -> list[str]:
        """The settings of training that do not depend on what is found."""
        held_out, short = str(self.held_out), self.choices.minutes < 60
        found = [
            f"target.dtype={self.choices.dtype}", f"data.train={self.answers}",
            f"data.validation={held_out}", "data.validation_share=null",
            f"train.output={self.head_folder}", "train.curve=true",
            f"train.save_minutes={min(10.0, self.choices.minutes / 10):g}",
            f"train.max_minutes={self.choices.minutes:g}", f"train.seed={self.choices.seed}",
        ]  # fmt: skip
        if short:  # a few small steps teach more than fewer large ones in so short a time
            found += ["train.batch_rows=2", "train.micro_batch_rows=2"]
            found += ["head.ttt_steps=3"] if self.choices.family.startswith("eagle3") else []
        return [*found, f"train.cpu={self.choices.device == 'cpu'}".lower()]

    def fitting(self) -> list[str]:
        """The settings, with the change that makes training fit into memory if one is needed."""
        settings = self.usual()
        plan = plan_training(self.config, settings, 1, None, None, False, has_data=False)
        for remedy in () if plan.fits else plan.remedies:
            if remedy.total <= plan.room:
                return [*settings, remedy.setting]
        if not plan.fits:
            raise UserError(plan.verdict())
        return settings

    # Time.

    @property
    def left(self) -> float:
        """Seconds of the build's time that are not used."""
        return 60 * self.choices.minutes - self.folder.seconds - self.view.seconds

    def to_learn(self) -> float:
        """Seconds for answers and learning."""
        return max(0.0, self.left - measuring_seconds(self.choices.minutes))

    # The stages.

    def run(self) -> None:
        """Do what is not done."""
        with View(self.path, STAGES, self.so_far) as self.view:
            for name, share in zip(STAGES, FIRST_SHARES, strict=True):
                self.view.expected[name] = 60 * share * self.choices.minutes
                if name in self.folder.stages:
                    self.view.taken[name] = self.folder.stages[name]["seconds"]
            works: dict[str, Callable[[], Facts]] = {
                "prompts": self.prompts, "held out": self.answer_held_out, "plan": self.plan,
                "answers": self.answer, "ngrams": self.count, "train": self.train,
                "evaluate": self.evaluate, "race": self.race, "export": self.export,
                "report": self.report,
            }  # fmt: skip
            for name in STAGES:
                if name not in self.folder.stages:
                    with self.view.stage(name):
                        facts = works[name]()
                        self.folder.finish(name, self.view.seconds, facts)
                    for sentence in facts.get("said", ()):
                        self.view.say(f"    {sentence}")

    def so_far(self) -> str:
        """The head's tau by its last evaluation."""
        with suppress(ValueError):
            taus = [
                e["tau_tree"][str(BEST_BY)] for e in read_log(self.head_folder / EVALUATION_FILE)
            ]
            return f"tau so far {taus[-1]:.2f}" if taus else ""
        return ""

    def fact(self, stage: str, name: str) -> Any:
        """What a stage that is done has found; None where it has not."""
        return self.folder.stages.get(stage, {}).get(name)

    def decoder(self) -> Decoder:
        """The target, loaded once for all that it answers."""
        if self.loaded is None:
            self.loaded = Decoder.from_pretrained(self.model.load(), compile=self.choices.compile)
        return self.loaded

    def prompts(self) -> Facts:
        """Prompts, parted."""
        if self.choices.prompts:
            given = self.choices.prompts, self.choices.minutes, self.choices.seed, self.files
            return {"given": part_given(*given)}
        held = HeldOut.of(self.choices.minutes, None)
        self.invent(held.both)
        part_invented(self.files, held)
        return {"held": held.both}

    def invent(self, number: int) -> None:
        """Have so many messages of users."""
        settings = InventSettings(
            self.choices.target, seed=self.choices.seed, dtype=self.choices.dtype,
            compile=self.choices.compile, batch_size=2 * BATCH,
        )  # fmt: skip
        source = MessageSource(self.decoder(), settings)
        with full_disk_named(self.files.invented):
            invent(source, self.files.invented, number)
        self.folder.command(
            "prompts",
            [
                "data", "invent", "--target", settings.target, "--number", number, "--seed",
                settings.seed, "--batch-size", settings.batch_size, "--output", self.files.invented,
            ],
        )  # fmt: skip

    def distil(self, stage: str, prompts: Path, output: Path, limit: int | None) -> DistillReport:
        """The target's answers to the first prompts of a file, those that are there kept."""
        settings = DistillSettings(
            self.choices.target, str(prompts), self.choices.max_new_tokens,
            dtype=self.choices.dtype, batch_size=BATCH,
        )  # fmt: skip
        file = DistilledFile(output, settings, False, None)
        file.check()
        rows = read_conversations(prompts, None, limit)
        words = [
            "data", "distill", "--target", settings.target, "--prompts", prompts, "--output",
            output, "--max-new-tokens", settings.max_new_tokens, "--batch-size", BATCH,
            "--limit", len(rows),
        ]  # fmt: skip
        self.folder.command(stage, words)
        with full_disk_named(output), file:
            return distill(DecoderSource(self.decoder()), rows, file)

    def answer_held_out(self) -> Facts:
        """Answers to the held-out prompts; where prompts are invented, also about these answers."""
        stage, files = "held out", self.files
        found = self.distil(stage, files.held_out, self.held_out, None)
        if not self.choices.prompts:
            add_about_texts(files.test, self.held_out, seed=-1)
            if add_about_texts(files.held_out, self.held_out, seed=-2):
                found = self.distil(stage, files.held_out, self.held_out, None)
        lengths = found.statistics.lengths
        return {
            "answers": found.statistics.rows,
            "length": sum(lengths) / len(lengths),
            "tokens_per_s": sum(lengths) / self.view.seconds,
        }

    def plan(self) -> Facts:
        """How fast a head learns here, and what a token costs that is decoded alone."""
        decoder, prompt = self.decoder(), read_conversations(self.files.test, None, 1)[0]
        began = time.monotonic()
        [text] = [m["content"] for m in prompt.messages if m["role"] == "user"][:1]
        stats = decoder.generate([text], max_new_tokens=24).stats
        alone = (time.monotonic() - began) / max(1, stats.steps)
        self.loaded = None
        gc.collect()
        settings = self.fitting()
        trial = run_trial(
            self.config, [*settings, f"data.train={self.held_out}", "data.validation=null"]
        )
        tokens = trial.tokens_per_s * self.to_learn()
        said = [
            f"a head learns {trial.tokens_per_s:,.0f} tokens/s here, with "
            f"{trial.peak / 1e9:.1f} GB of memory"
        ]
        is_worth_it = tokens / 2 >= FEWEST_TOKENS
        if not is_worth_it:
            needed = 4 * FEWEST_TOKENS / trial.tokens_per_s / 60
            said.append(
                f"in the time that is left it would read less than {FEWEST_TOKENS:,} tokens: none "
                f"is trained, lookup and n-grams cost nothing; a head needs --minutes {needed:.0f}"
            )
        return {
            "learning": trial.tokens_per_s, "seconds_a_token": alone, "settings": settings,
            "trains": is_worth_it, "said": said,
        }  # fmt: skip

    def answer(self) -> Facts:
        """Answers, window after window, for as long as more of them teach more than learning."""
        learning, answering = self.fact("plan", "learning"), self.fact("held out", "tokens_per_s")
        seconds, report = 0.0, None
        while True:
            began = time.monotonic()
            there = self.answered()
            rows = answering * self.to_learn() / self.fact("held out", "length") / WINDOWS
            window = BATCH * max(1, min(WINDOW, int(rows / BATCH)))
            wanted = there + window
            available = self.have_prompts(wanted)
            if available <= there:
                break
            report = self.distil("answers", self.files.train, self.answers, min(wanted, available))
            seconds = time.monotonic() - began
            if not report.written:
                break
            tokens, answering = sum(report.statistics.lengths), report.tokens / seconds
            best = division(self.to_learn(), Speeds(answering, learning), tokens)
            self.view.expected["answers"] = self.view.seconds + (best.answers - tokens) / answering
            self.view.expected["train"] = best.learnt / learning
            if best.answers - tokens < tokens / report.statistics.rows * window / 2:
                break
        rows = read_rows(self.answers)
        tokens = sum(len(one["answer"]) for row in rows for one in row["token_ids"])
        speed = report.tokens / seconds if report and report.written else None
        return {
            "rows": len(rows), "tokens": tokens, "tokens_per_s": speed,
            "said": [f"{len(rows):,} answers, {tokens:,} tokens"],
        }  # fmt: skip

    def answered(self) -> int:
        """How many answers are there."""
        return len(read_rows(self.answers)) if self.answers.exists() else 0

    def have_prompts(self, number: int) -> int:
        """How many prompts there are to learn from, after so many were asked for."""
        if not self.choices.prompts:
            rows, held = read_rows(self.files.train), self.fact("prompts", "held")
            if rows and self.answers.exists():
                add_about_texts(self.files.train, self.answers, seed=len(rows))
                rows = read_rows(self.files.train)
            missing = number - len(rows)
            if missing > 0:
                own = sum(row["id"].startswith("invented-") for row in rows)
                self.invent(held + own + missing)
                write_rows(self.files.train, [*rows, *read_rows(self.files.invented)[held + own :]])
        return len(read_rows(self.files.train))

    def count(self) -> Facts:
        """The table of n-grams."""
        with suppress(FileNotFoundError):
            for old in self.ngrams.iterdir():
                old.unlink()
        index.main(
            data=str(self.answers), target=self.choices.target, output=self.ngrams,
            rows=options.Rows(),
        )  # fmt: skip
        words = ["data", "index", "--data", self.answers, "--target", self.choices.target]
        self.folder.command("ngrams", [*words, "--output", self.ngrams])
        table = load_table(self.ngrams, vocabulary_of(tokenizer_named(self.choices.target)))
        texts = [one["answer"] for row in read_rows(self.held_out) for one in row["token_ids"]]
        taus = {
            "lookup": tokens_a_pass(PromptLookup(DEPTH), texts, BEST_BY),
            "n-grams": tokens_a_pass(StoreLookup(table), texts, BEST_BY),
        }
        shown = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
        return {"tau": taus, "said": [f"tau at {BEST_BY} nodes without training: {shown}"]}

    def train(self) -> Facts:
        """The head."""
        if not self.fact("plan", "trains"):
            return {}
        self.loaded = None
        gc.collect()
        config = self.training()
        forget_accelerate()
        if not train(config):
            raise KeyboardInterrupt
        forget_accelerate()
        summary, seconds = summarize(self.head_folder), None
        speed, rows = self.fact("answers", "tokens_per_s"), self.fact("answers", "rows")
        if speed:
            tokens = self.fact("answers", "tokens") / rows
            seconds = tokens / speed + summary.seconds / rows
        said = what_more_would_bring(self.head_folder, seconds)
        return {"tokens": summary.supervised_tokens, "said": said}

    def training(self) -> RunConfig:
        """The run: as long as there is time; begun anew where it was another one."""
        settings = list(self.fact("plan", "settings"))
        minutes = self.fact("plan", "minutes") or max(0.2, self.to_learn() / 60)
        self.folder.stages["plan"]["minutes"] = minutes  # a resumed run lasts as long
        self.folder.command("train", ["train", "--config", self.config, *settings])
        self.folder.finish(
            "plan", self.folder.stages["plan"].pop("seconds"), self.folder.stages["plan"]
        )
        settings.append(f"train.max_minutes={minutes:.3f}")
        with suppress(UserError):
            config = load_run_config(self.config, settings)
            if config.folder().status(False) in ("resumable", "finished"):
                return config
        return load_run_config(self.config, [*settings, "train.overwrite=true"])

    @property
    def head(self) -> Path | None:
        """The head to take: the one that drafted held-out answers best."""
        if not self.fact("plan", "trains"):
            return None
        best = self.head_folder / BEST_FOLDER
        return best if best.exists() else self.head_folder

    def evaluate(self) -> Facts:
        """What the head accepts on held-out answers, and what trees cost here."""
        if self.head is None:
            return {}
        evaluate.main(
            head=self.head, model=self.model, data=[str(self.held_out)], limit=200,
            rows=options.Rows(), output=self.path / "evaluation.json", save_acceptance=True,
        )  # fmt: skip
        forget_accelerate()
        tree.main(
            model=self.model, draft=str(self.head), batch=1, temperature=0.0,
            compile=self.choices.compile, fresh=False, output=self.path / "tree.json",
        )  # fmt: skip
        target = ["--target", self.choices.target]
        self.folder.command(
            "evaluate",
            ["head", "evaluate", self.head, *target, "--data", self.held_out, "--save-acceptance"],
        )
        [found] = read_json(self.path / "evaluation.json")["data"].values()
        return {"tau": found["tau_tree"][str(BEST_BY)]}

    @property
    def drafts(self) -> list[str]:
        """All that drafts, as `--draft` names it."""
        return [*([str(self.head)] if self.head else []), f"ngrams:{self.ngrams}", "lookup"]

    def race(self) -> Facts:
        """All ways of decoding, on prompts that nothing has seen."""
        drafts = self.drafts
        tokens = min(RACED_TOKENS, self.choices.max_new_tokens)
        ways = 7 if self.head else 4
        length = min(tokens, self.fact("held out", "length"))
        each = self.fact("plan", "seconds_a_token") * length * ways
        there = len(read_rows(self.files.test))
        limit = max(min(4, there), min(there, int(self.left / 2 / each)))
        terms = compare.Race(limit=limit, rounds=1, max_new_tokens=tokens, seed=self.choices.seed)
        compare.run_race(
            self.model, options.Drafting(draft=drafts), str(self.files.test), terms, "auto",
            self.choices.compile, self.race_folder,
        )  # fmt: skip
        words: list[object] = ["compare", "--target", self.choices.target]
        for each_draft in drafts:
            words += ["--draft", each_draft]
        words += ["--prompts", self.files.test, "--limit", limit, "--rounds", 1]
        words += ["--max-new-tokens", tokens, "--output", self.race_folder]
        self.folder.command("race", words + (["--compile"] if self.choices.compile else []))
        section = comparison_section(self.race_folder)
        ours = [r for r in read_json(self.race_folder / "comparison.json")["rows"] if r["tau"]]
        best = max(ours, key=lambda row: row["speedup_hf"])
        return {"fastest": best["mode"], "headline": section.headline}

    def export(self) -> Facts:
        """The servers that can read the head, each layout checked against its reader."""
        if self.head is None:
            return {}
        target = Target.from_pretrained(self.choices.target, "float32", "cpu")
        facts = TargetFacts.of(target, self.choices.target)
        head, found, said = load_head(self.head, target), {}, []
        for server in METHODS:
            with TemporaryDirectory(dir=self.path) as scratch:
                output = Path(scratch) / "served"
                try:
                    served = export_for(server, head, self.head, facts, target, output)
                    found[server] = f"{served.layout}, K = {served.tokens}"
                except UserError as error:
                    said.append(str(error))
        readers = ", ".join(found) or "none"
        return {"servers": found, "refused": said, "said": [f"servers that read it: {readers}"]}

    def report(self) -> Facts:
        """The page, and the head's card."""
        page, headline = self.path / "report.html", self.fact("race", "headline")
        if self.head is None:
            sections = [comparison_section(self.race_folder)]
            write_text(page, run_page(Path(self.choices.target).name, [], sections))
            return {}
        report.main(self.head_folder, comparison=[self.race_folder], output=page)
        text = card(str(self.head), read_foreign(self.head, TargetFacts())[1])
        write_text(self.head / "README.md", f"{text}\n{headline}\n")
        return {}

    def ending(self) -> str:
        """What is fastest here, and what to run."""
        mode, target = self.fact("race", "fastest"), self.choices.target
        named = drafts_by_name(self.drafts)
        drafts = [str(named.get(name, name)) for name in mode.split(" + ") if name != PLAIN]
        options_of = "".join(f" --draft {draft}" for draft in drafts)
        compiled = " --compile" if self.choices.compile else ""
        lines = [
            self.fact("race", "headline"),
            f"  drafthead chat --target {target}{options_of}{compiled}",
            "  from drafthead.infer import Decoder",
            f"  decoder = Decoder.from_pretrained({target!r}, draft={drafts!r}"
            f"{', compile=True' if compiled else ''})",
            '  print(decoder.generate(["..."], max_new_tokens=128).texts[0])',
        ]
        for server in list(self.fact("export", "servers") or ())[:1]:
            lines.append(
                f"  drafthead head export {self.head} --target {target} --for {server} "
                f"--output {self.path / 'served'}"
            )
        return "\n".join(
            [*lines, f"{self.path / 'report.html'} has the figures, build.yaml each choice"]
        )


def forget_accelerate() -> None:
    """Let the next user of accelerate choose its own number type: one process, several jobs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
