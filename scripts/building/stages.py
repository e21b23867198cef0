"""The stages of `drafthead build`: each is the work of another verb."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import join, quote
from shutil import disk_usage, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import tokenizer_named
from drafthead.core.target.loading import vocabulary_of
from drafthead.heads.formats import read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.checkpoint import SHIPPED_HEADS
from drafthead.heads.formats.files import read_json
from drafthead.heads.formats.uploading import GENERATE_FILE, card, generate_file
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import DEPTH, StoreLookup, load_table
from drafthead.lab.building.answering import Answering
from drafthead.lab.building.budget import FEWEST_TOKENS, measuring_seconds, rows_of_steps
from drafthead.lab.building.folder import STAGES, BuildFolder, Choices, Facts
from drafthead.lab.building.prompts import read_rows
from drafthead.lab.building.view import View
from drafthead.lab.learning_curve import LearningCurve, in_words, what_more_would_bring
from drafthead.lab.planned_training import (
    Trial,
    TrialOutOfMemoryError,
    plan_training,
    run_trial,
)
from drafthead.lab.races.race import PLAIN
from drafthead.lab.races.record import drafts_by_name
from drafthead.lab.reports.comparison import NAMES
from drafthead.lab.reports.index import tokens_a_pass
from drafthead.lab.reports.run_page import comparison_section, run_page
from drafthead.lab.servers.export_for import METHODS, export_for, read_head
from drafthead.scripts import compare, options
from drafthead.scripts.data import index
from drafthead.scripts.explain import report, tree
from drafthead.scripts.head import evaluate
from drafthead.train.data.conversations import read_conversations
from drafthead.train.run.config import load_run_config, written_override
from drafthead.train.run.folder import BEST_BY, BEST_FOLDER, EVALUATION_FILE, read_log, summarize
from drafthead.train.run.starting_config import target_sizes, write_starting_config
from drafthead.train.train_heads import train

SPOKEN = {
    "head": "the head",
    "ngrams": "the table of n-grams",
    "lookup": "lookup",
}  # of what drafts
RACED_TOKENS = 128  # of an answer, at most
LEAST_TRAINING = 12.0  # seconds
STEP_ON_GPU = 2**14  # tokens of a step: one of fewer takes as long


class Building:
    """A build at work."""

    def __init__(self, choices: Choices, folder: BuildFolder, scratch: Path | None = None):
        """The settings of training go into the folder `scratch` instead, if one is given."""
        self.choices, self.folder, self.path = choices, folder, folder.path
        self.fact = folder.fact
        self.source = Answering(choices, folder)
        self.model = options.Model(
            target=choices.target, dtype=choices.dtype, device=choices.device
        )
        self.config, self.trained = (scratch or self.path) / "train.yaml", self.path / "head"
        self.ngrams, self.raced = self.path / "ngrams", self.path / "race"
        self.features = self.path / "features"  # of the answers, while a head learns
        self.a_graph = float(self.fact("plan", "a_graph") or 0)
        self.view = View(self.path, {name: stage.words for name, stage in STAGES.items()}, self.tau)

    def first_plan(self) -> str:
        """What will be made, and what it needs; raises UserError where it cannot fit."""
        if "plan" in self.folder.stages:
            return (
                f"{self.path} goes on: {len(self.folder.stages)} of {len(STAGES)} stages are done"
            )
        self.config.unlink(missing_ok=True)
        write_starting_config(self.choices.family, self.choices.target, self.config)
        self.settings = self.usual()
        plan = plan_training(self.config, self.settings, 1, None, None, False, has_data=False)
        disk, free = plan.disk.states + plan.disk.head, self.free_disk()
        if free < disk:
            raise UserError(
                f"the head's files need {disk / 1e9:.1f} GB, and the disk of {self.path} has "
                f"{free / 1e9:.1f} GB: make room, or choose another --output"
            )
        verdict = plan.verdict()
        if not plan.fits:
            raise UserError(verdict)
        chosen = self.choices
        start = f", from {chosen.init_from}" if chosen.init_from else ""
        return (
            f"{self.path}, in {in_words(60 * chosen.minutes)}: prompts, answers of "
            f"{chosen.target}, a table of n-grams, a head ({chosen.family}{start}), a race, a "
            f"report\n{self.relatives()}training: {verdict}; {disk / 1e6:.0f} MB of disk"
        )

    def relatives(self) -> str:
        """A line that offers the shipped heads whose target has the sizes of this one."""
        facts = ("hidden_size", "vocab_size")
        sizes = target_sizes(self.choices.target)
        found = [
            name
            for name in (() if self.choices.init_from else SHIPPED_HEADS)
            if (head := read_foreign(Path(name), TargetFacts())[1]).family == self.choices.family
            and all(getattr(head.target, fact) == getattr(sizes, fact) for fact in facts)
            and head.target.num_layers == sizes.num_hidden_layers
        ]
        return "".join(
            f"--init-from {name} starts from a head of a model of the same shape: faster, if yours "
            "is fine-tuned from that\n"
            for name in found
        )

    def free_disk(self) -> int:
        """Bytes that are free where the folder is, or will be."""
        path = self.path.absolute()
        return disk_usage(next(p for p in (path, *path.parents) if p.is_dir())).free

    @property
    def keeps(self) -> bool:
        """Whether features are kept: on a processor the target's pass is half of a step."""
        return self.choices.device == "cpu" or not torch.accelerator.is_available()

    def usual(self) -> list[str]:
        """The settings of training that do not depend on what is found."""
        found: dict[str, str | float | None] = {
            "target.dtype": self.choices.dtype, "data.train": str(self.source.answers),
            "data.validation": str(self.source.held_out), "data.validation_share": None,
            "train.output": str(self.trained), "train.curve": True,
            "train.save_minutes": min(10.0, self.choices.minutes / 10),
            "train.max_minutes": self.choices.minutes, "train.seed": self.choices.seed,
            "train.cpu": self.choices.device == "cpu",
        }  # fmt: skip
        if self.keeps:
            found["data.feature_folder"] = str(self.features)
            found["data.feature_budget_gb"] = round(self.free_disk() / 4e9, 3)
            if self.choices.minutes < 60:  # a few small steps teach more than fewer large ones
                found["train.batch_rows"] = 2
                found |= {"head.ttt_steps": 3} if self.choices.family.startswith("eagle3") else {}
        else:
            rows = max(2, STEP_ON_GPU // load_run_config(self.config).data.max_length)
            found |= {"train.batch_rows": rows, "train.micro_batch_rows": rows}
        return [*self.start(), *(written_override(name, value) for name, value in found.items())]

    def start(self) -> list[str]:
        """The settings of a head that starts from another one: its shape is that head's."""
        source = self.choices.init_from
        if source is None:
            return []
        _, head = read_foreign(Path(source), TargetFacts())
        shape = {name: json.dumps(value) for name, value in asdict(head.config).items()}
        if head.family != load_run_config(self.config).family:
            raise UserError(f"--init-from {source} is a head of --family {head.family}: give both")
        return [written_override("train.init_from", source)] + [
            f"head.{name}={value}" for name, value in shape.items()
        ]

    def left(self) -> float:
        """Seconds of the build's time that are not used."""
        return 60 * self.choices.minutes - self.folder.seconds - self.view.seconds

    def compiling(self, *names: str) -> float:
        """Seconds in which stages compile, by the graph that took longest so far."""
        return sum(STAGES[name].graphs for name in names) * self.a_graph

    def to_learn(self) -> float:
        """Seconds for answers and learning."""
        measuring = measuring_seconds(self.choices.minutes) + self.compiling(*STAGES)
        return max(0.0, self.left() - measuring)

    def expect(self) -> None:
        """How long the stages will take, as far as that is known."""
        for name, stage in STAGES.items():
            own = 60 * stage.share * self.choices.minutes
            self.view.expected[name] = own + self.compiling(name)

    def run(self) -> None:
        """Do what is not done."""
        works: dict[str, Callable[[], Facts]] = {
            "prompts": self.source.part_prompts, "held out": self.source.answer_held_out,
            "plan": self.plan, "answers": lambda: self.source.answer(self.to_learn, self.view),
            "ngrams": self.count, "train": self.train, "evaluate": self.evaluate,
            "race": self.race, "export": self.export, "report": self.report,
        }  # fmt: skip
        self.expect()
        for name in STAGES:
            if name in self.folder.stages:
                self.view.taken[name] = self.fact(name, "seconds")
        with self.view:
            for name in STAGES:
                if name not in self.folder.stages:
                    with self.view.stage(name):
                        facts = works[name]()
                        self.folder.finish(name, self.view.seconds, facts)
                    if name == "plan":
                        self.expect()
                    for sentence in facts.get("said", ()):
                        self.view.say(f"    {sentence}")

    def tau(self) -> str:
        """The head's tau by its last evaluation, if there is one."""
        found = [e["tau_tree"][str(BEST_BY)] for e in read_log(self.trained / EVALUATION_FILE)]
        return f"tau so far {found[-1]:.2f}" if found else ""

    def plan(self) -> Facts:
        """How fast a head learns here, and what a token costs that is decoded alone."""
        decoder = self.source.decoder()
        prompt = read_conversations(self.source.files.test, None, 1)[0]
        text = next(m["content"] for m in prompt.messages if m["role"] == "user")
        decoder.generate([text], max_new_tokens=8)  # compiles and records what is needed
        began = time.monotonic()
        steps = decoder.generate([text], max_new_tokens=24).stats.steps
        alone = (time.monotonic() - began) / max(1, steps)
        self.a_graph = decoder.target.backend.longest
        self.source.forget()
        rmtree(self.features, ignore_errors=True)
        if self.trained.exists():  # of an earlier plan: with other settings it does not go on
            rmtree(self.path / "head_before", ignore_errors=True)
            self.trained.rename(self.path / "head_before")
        train_on = written_override("data.train", str(self.source.held_out))
        data = [train_on, "data.validation=null"]
        trial = self.fitting_trial(data)
        speed = trial.tokens_per_s
        said = [f"a head learns {speed:,.0f} tokens/s here, in {trial.peak / 1e9:.1f} GB of memory"]
        trains = speed * self.to_learn() / 2 >= FEWEST_TOKENS
        if not trains:
            said.append(
                f"it would read less than {FEWEST_TOKENS:,} tokens in the time that is left: none "
                "is trained, as lookup and n-grams cost nothing; for a head give --minutes "
                f"{self.choices.minutes + 2 * FEWEST_TOKENS / speed / 60:.0f}"
            )
        a_row = trial.tokens / trial.rows / max(1, trial.steps - 1)
        train = load_run_config(self.config, self.settings).train
        rows = rows_of_steps(train.batch_rows, speed * self.to_learn() / 2, a_row)
        self.settings = changed(self.settings, "train.batch_rows", rows)
        return {
            "learning": speed, "rereading": trial.tokens_per_s_kept if self.keeps else speed,
            "seconds_a_token": alone, "a_graph": self.a_graph, "settings": self.settings,
            "trains": trains, "said": said,
        }  # fmt: skip

    def fitting_trial(self, data: list[str]) -> Trial:
        """A trial of training, with half as many rows at a time until the memory suffices."""
        while True:
            rows = load_run_config(self.config, self.settings).train.micro_batch_rows
            try:
                return run_trial(self.config, [*self.settings, *data])
            except TrialOutOfMemoryError:
                if rows == 1:
                    raise
            self.settings = changed(self.settings, "train.micro_batch_rows", rows // 2)

    def count(self) -> Facts:
        """The table of n-grams, and what it brings without training."""
        rmtree(self.ngrams, ignore_errors=True)
        data, target = str(self.source.answers), self.choices.target
        index.main(data=data, target=target, output=self.ngrams, rows=options.Rows())
        table = load_table(self.ngrams, vocabulary_of(tokenizer_named(target)))
        rows = read_rows(self.source.held_out)
        texts = [one["answer"] for row in rows for one in row["token_ids"]]
        kinds = {"lookup": PromptLookup(DEPTH), "n-grams": StoreLookup(table)}
        taus = {name: tokens_a_pass(kind, texts, BEST_BY) for name, kind in kinds.items()}
        shown = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
        words = ["data", "index", "--data", data, "--target", target, "--output", str(self.ngrams)]
        return {
            "tau": taus, "said": [f"tau at {BEST_BY} nodes without training: {shown}"],
            "by_hand": join(["drafthead", *words]),
        }  # fmt: skip

    def train(self) -> Facts:
        """The head, for as long as there is time; a run that was killed lasts as long."""
        if not self.fact("plan", "trains"):
            return {}
        self.source.forget()
        begun = self.trained / "run.json"
        minutes = max(LEAST_TRAINING, self.to_learn()) / 60
        if begun.exists():
            minutes = read_json(begun)["settings"]["train"]["max_minutes"]
        settings = changed(self.fact("plan", "settings"), "train.max_minutes", minutes)
        forget_accelerate()
        if not train(load_run_config(self.config, settings)):
            raise KeyboardInterrupt
        forget_accelerate()
        rmtree(self.features, ignore_errors=True)
        summary, answers = summarize(self.trained), self.fact("answers", "answers")
        writing = self.fact("answers", "tokens") / answers / self.fact("answers", "tokens_per_s")
        said = what_more_would_bring(self.trained, writing + summary.seconds / answers)
        return {
            "tokens": summary.supervised_tokens, "said": said + self.against_the_table(),
            "by_hand": join(["drafthead", "train", "--config", str(self.config), *settings]),
        }  # fmt: skip

    def against_the_table(self) -> list[str]:
        """Whether n-grams draft better than the head, and how much time would change that."""
        curve, table = LearningCurve.of_run(self.trained), self.fact("ngrams", "tau")["n-grams"]
        if curve is None or curve.best > table:
            return []
        enough = next((n for n in (2, 4) if curve.forecast(n).tau > table), None)
        advice = f"the head is not near it with {4 * curve.answers:,} answers"
        if enough:
            advice = (
                f"by its curve the head is ahead with --minutes {enough * self.choices.minutes:g}"
            )
        return [f"the table of n-grams has a tau of {table:.2f}, more than the head: {advice}"]

    @property
    def head(self) -> Path | None:
        """The head to take: the one that drafted held-out answers best."""
        if not self.fact("plan", "trains"):
            return None
        best = self.trained / BEST_FOLDER
        return best if best.exists() else self.trained

    def evaluate(self) -> Facts:
        """What the head accepts on held-out answers, and what trees cost here."""
        if self.head is None:
            return {}
        data, output = str(self.source.held_out), self.path / "evaluation.json"
        evaluate.main(
            head=self.head, model=self.model, data=[data], limit=200, rows=options.Rows(),
            output=output, trace=self.path / "trace.json", save_acceptance=True,
        )  # fmt: skip
        forget_accelerate()
        tree.main(
            model=self.model, draft=str(self.head), batch=1, temperature=0.0,
            compile=self.choices.compile, fresh=False, output=self.path / "tree.json",
        )  # fmt: skip
        words = ["--data", data, "--save-acceptance"]
        tau = read_json(output)["data"][data]["tau_tree"][str(BEST_BY)]
        return {
            "tau": tau, "said": [f"tau at {BEST_BY} nodes with the head: {tau:.2f}"],
            "by_hand": f"drafthead head evaluate {quote(str(self.head))} "
            f"{self.choices.model_options} {join(words)}",
        }  # fmt: skip

    @property
    def drafts(self) -> list[str]:
        """All that drafts, as `--draft` names it."""
        return [*([str(self.head)] if self.head else []), f"ngrams:{self.ngrams}", "lookup"]

    def race(self) -> Facts:
        """All ways of decoding, on as many prompts that nothing has seen as there is time for."""
        prompts, tokens = self.source.files.test, min(RACED_TOKENS, self.choices.max_new_tokens)
        ways = 7 if self.head else 4
        length = min(tokens, self.fact("held out", "length"))
        there = len(read_rows(prompts))
        racing = (self.left() - self.compiling("race")) / 2
        limit = int(racing / (self.fact("plan", "seconds_a_token") * length * ways))
        limit = max(min(4, there), min(there, limit))
        terms = compare.Race(limit=limit, rounds=1, max_new_tokens=tokens, seed=self.choices.seed)
        compare.run_race(
            self.model, options.Drafting(draft=self.drafts), str(prompts), terms,
            self.choices.compile, self.raced,
        )  # fmt: skip
        rows = read_json(self.raced / "comparison.json")["rows"]
        ours = sorted((row for row in rows if row["tau"]), key=lambda row: row["speedup_hf"])
        best, kinds = ours[-1], drafts_by_name(self.drafts)

        def needs(row: Mapping[str, Any]) -> int:
            """What must be made for this way of decoding: nothing, a table, or a head."""
            parts = [kinds[part].name for part in row["mode"].split(" + ") if part in kinds]
            return max([0, *({"ngrams": 1, "head": 2}.get(part, 0) for part in parts)])

        def spoken(row: Mapping[str, Any]) -> str:
            parts = row["mode"].split(" + ")
            named = [SPOKEN[kinds[p].name] if p in kinds else NAMES.get(p, p) for p in parts]
            return " with ".join(named)

        mode = NAMES.get(best["mode"], best["mode"])
        headline = comparison_section(self.raced).headline.replace(mode, spoken(best), 1)
        headline += f", on {limit} prompts"
        if simpler := [row for row in ours if needs(row) < needs(best)]:
            share = simpler[-1]["speedup_hf"] / best["speedup_hf"]
            headline += f"; {spoken(simpler[-1])} alone has {share:.0%} of that speed"
        return {
            "fastest": best["mode"], "headline": headline,
            "by_hand": f"drafthead compare{self.options_of(self.drafts)} --prompts "
            f"{quote(str(prompts))} --limit {limit} --rounds 1 --max-new-tokens {tokens} "
            f"--output {quote(str(self.raced))}",
        }  # fmt: skip

    def options_of(self, drafts: list[str]) -> str:
        """The options that name the target, what drafts, and whether passes are compiled."""
        named = "".join(f" --draft {quote(draft)}" for draft in drafts)
        return f" {self.choices.model_options}{named}{self.choices.compile_option}"

    def export(self) -> Facts:
        """The servers that can read the head, each layout checked against its reader."""
        if self.head is None:
            return {}
        head, facts, target = read_head(self.head, None)  # of our format, which needs no target
        found, refused = dict[str, str](), list[str]()
        for server in METHODS:
            with TemporaryDirectory(dir=self.path) as scratch:
                output = Path(scratch) / "served"
                try:
                    served = export_for(server, head, self.head, facts, target, output)
                    found[server] = f"{served.layout}, K = {served.tokens}"
                except UserError as error:
                    refused.append(str(error))
        said = [f"servers that read the head: {', '.join(found) or 'none'}"]
        return {"servers": found, "refused": refused, "said": said}

    def report(self) -> Facts:
        """The page, and the head's card."""
        page, name = self.path / "report.html", Path(self.choices.target).name
        if self.head is None:
            write_text(page, run_page(name, [], [comparison_section(self.raced)]))
            return {}
        report.main(self.trained, comparison=[self.raced], output=page)
        _, foreign = read_foreign(self.head, TargetFacts())
        text = card(f"OWNER/{name}-{self.choices.family}", foreign)
        write_text(self.head / "README.md", f"{text}\n{self.fact('race', 'headline')}\n")
        (self.head / GENERATE_FILE).parent.mkdir(exist_ok=True)
        write_text(self.head / GENERATE_FILE, generate_file(str(self.head)))
        return {}

    def ending(self) -> str:
        """What is fastest here, and what to run."""
        mode, target = self.fact("race", "fastest"), self.choices.target
        named = drafts_by_name(self.drafts)
        drafts = [str(named.get(name, name)) for name in mode.split(" + ") if name != PLAIN]
        compiled = "" if self.choices.compile is None else f", compile={self.choices.compile}"
        lines = [
            self.fact("race", "headline"),
            f"  drafthead chat{self.options_of(drafts)}",
            f"  drafthead serve{self.options_of(drafts)}",
            "  from drafthead.infer import Decoder",
            f"  decoder = Decoder.from_pretrained({target!r}, draft={drafts!r}{compiled})",
            '  print(decoder.generate(["..."], max_new_tokens=128).texts[0])',
        ]
        for server in list(self.fact("export", "servers") or ())[:1]:
            output = quote(str(self.path / "served"))
            lines.append(
                f"  drafthead head export {quote(str(self.head))} --for {server} --output {output}"
            )
        return "\n".join([*lines, f"figures: {self.path}/report.html; choices: build.yaml there"])


def changed(settings: Sequence[str], name: str, value: float) -> list[str]:
    """Settings in which one has another value."""
    others = [setting for setting in settings if not setting.startswith(f"{name}=")]
    return [*others, written_override(name, value)]


def forget_accelerate() -> None:
    """Let the next user of accelerate choose its own number type: one process, several jobs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
