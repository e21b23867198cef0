"""The stages of `drafthead build`: each is the work of another verb."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import join, quote
from shutil import disk_usage, rmtree
from tempfile import TemporaryDirectory

import torch
from accelerate.state import AcceleratorState, GradientState

from drafthead.core.errors import UserError
from drafthead.core.storage.files import json_lines, write_text
from drafthead.core.target.any_target import tokenizer_named
from drafthead.core.target.loading import vocabulary_of
from drafthead.heads.formats import read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.files import read_json
from drafthead.heads.formats.uploading import GENERATE_FILE, card, generate_file
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import DEPTH, StoreLookup, load_table
from drafthead.lab.building.answering import BuildAnswers
from drafthead.lab.building.budget import (
    FEWEST_TOKENS,
    LEAST,
    TRYING,
    measuring_seconds,
    minutes_for,
    rows_of_steps,
)
from drafthead.lab.building.choices import Choices
from drafthead.lab.building.folder import STAGES, BuildFolder, Facts
from drafthead.lab.building.prompts import read_rows
from drafthead.lab.building.view import View
from drafthead.lab.learning_curve import LearningCurve, in_words, what_more_would_bring
from drafthead.lab.races.comparison import ComparisonRow
from drafthead.lab.races.race import PLAIN
from drafthead.lab.races.record import drafts_by_name
from drafthead.lab.reports.comparison import fastest, headline, named
from drafthead.lab.reports.index import tokens_a_pass
from drafthead.lab.reports.run_page import (
    Section,
    comparison_section,
    read_race,
    report_of,
    run_page,
)
from drafthead.lab.servers.export_for import METHODS, export_for, read_head
from drafthead.lab.trial import MOST_SECONDS, Trial, TrialOutOfMemoryError, run_trial
from drafthead.scripts import compare, options
from drafthead.scripts.data import index
from drafthead.scripts.explain import tree
from drafthead.scripts.head import evaluate
from drafthead.train.data.conversations import read_conversations
from drafthead.train.run.config import load_run_config, written_override
from drafthead.train.run.folder import BEST_BY, BEST_FOLDER, EVALUATION_FILE, summarize
from drafthead.train.run.starting_config import write_starting_config
from drafthead.train.train_heads import train

# What drafts, in words: first what needs least.
NEEDS = {"lookup": "lookup", "ngrams": "the table of n-grams", "head": "the head"}
RACED_TOKENS, RACED_LEAST = 128, 32  # of an answer, at most; and where no time is left
LEAST_TRAINING = 12.0  # seconds
LEAST_DISK = 100_000_000  # bytes: what a small head and its saved states take
STEP_ON_GPU = 2**14  # tokens of a step: one of fewer takes as long


class Building:
    """A build at work."""

    def __init__(self, choices: Choices, folder: BuildFolder, scratch: Path | None = None):
        """The settings of training go into the folder `scratch` instead, if one is given."""
        self.choices, self.folder, self.path = choices, folder, folder.path
        self.fact = folder.fact
        self.source = BuildAnswers(choices, folder)
        self.model = options.Model(
            target=choices.target, dtype=choices.dtype, device=choices.device
        )
        self.config, self.trained = (scratch or self.path) / "train.yaml", self.path / "head"
        self.ngrams, self.raced = self.path / "ngrams", self.path / "race"
        self.features = self.path / "features"  # of the answers, while a head learns
        self.a_graph, self.is_late = float(self.fact("plan", "a_graph") or 0), False
        self.view = View(self.path, {name: stage.words for name, stage in STAGES.items()}, self.tau)

    def first_plan(self) -> str:
        """The first plan, as text; raises UserError where the disk is full."""
        if "plan" in self.folder.stages:
            return (
                f"{self.path} goes on: {len(self.folder.stages)} of {len(STAGES)} stages are done"
            )
        self.free_disk()
        self.config.unlink(missing_ok=True)
        write_starting_config(self.choices.family, self.choices.target, self.config)
        self.settings = self.usual()
        chosen = self.choices
        start = f", from {chosen.init_from}" if chosen.init_from else ""
        return (
            f"{self.path}, in {in_words(60 * chosen.minutes)}: prompts, answers of "
            f"{chosen.target}, a table of n-grams, a head ({chosen.family}{start}), a race, a "
            "report"
        )

    def free_disk(self) -> int:
        """Bytes that are free where the folder is, or will be; UserError where there are few."""
        path = self.path.absolute()
        free = disk_usage(next(p for p in (path, *path.parents) if p.is_dir())).free
        if free < LEAST_DISK:
            raise UserError(
                f"the disk of {self.path} is full ({free / 1e6:.1f} MB are free): make room, or "
                "choose another --output"
            )
        return free

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
        """The seconds of the stages, as far as they are known."""
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
        with self.view:
            for name in STAGES:
                if name not in self.folder.stages:
                    with self.view.stage(name):
                        self.tell_of_time()
                        facts = works[name]()
                        self.folder.finish(name, self.view.seconds, facts)
                    if name == "plan":
                        self.expect()
                    for sentence in facts.get("said", ()):
                        self.view.say(f"    {sentence}")

    def tell_of_time(self) -> None:
        """Say once that the time is over."""
        if self.left() <= 0 and not self.is_late:
            self.is_late = True
            self.view.say(
                f"    {in_words(60 * self.choices.minutes)} are over: goes on with the least that "
                "a verdict needs"
            )

    def tau(self) -> str:
        """The head's tau by its last evaluation, if there is one."""
        found = [e["tau_tree"][str(BEST_BY)] for e in json_lines(self.trained / EVALUATION_FILE)]
        return f"tau so far {found[-1]:.2f}" if found else ""

    def plan(self) -> Facts:
        """Measure how fast a head learns here, and the cost of a token that is decoded alone."""
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
        costs = {"seconds_a_token": alone, "a_graph": self.a_graph}
        if not self.to_learn():
            return {**costs, "trains": False, "said": ["no time is left for a head"]}
        train_on = written_override("data.train", str(self.source.held_out))
        trial = self.fitting_trial([train_on, "data.validation=null"])
        speed = trial.tokens_per_s
        tokens = speed * self.to_learn() / 2
        a_row = trial.tokens / trial.rows / max(1, trial.steps - 1)
        train = load_run_config(self.config, self.settings).train
        rows = rows_of_steps(train.batch_rows, tokens, a_row)
        self.settings = changed(self.settings, "train.batch_rows", rows)
        learns = f"a head learns {speed:,.0f} tokens/s here, in {trial.peak / 1e9:.1f} GB of memory"
        return {
            **costs, "learning": speed, "settings": self.settings,
            "rereading": trial.tokens_per_s_kept if self.keeps else speed,
            "trains": tokens >= FEWEST_TOKENS,
            "said": [learns, *([] if tokens >= FEWEST_TOKENS else [self.too_short(speed)])],
        }  # fmt: skip

    def too_short(self, speed: float) -> str:
        """A sentence on why no head is trained at that speed of learning, and the time it needs."""
        used = self.folder.seconds + self.view.seconds + self.compiling(*STAGES)
        return (
            f"no head is trained: it should read {FEWEST_TOKENS:,} tokens at least, and there is "
            f"time for {speed * self.to_learn() / 2:,.0f}; for a head give --minutes "
            f"{minutes_for(2 * FEWEST_TOKENS / speed, used)}"
        )

    def fitting_trial(self, data: list[str]) -> Trial:
        """A trial of training, with half as many rows at a time until the memory suffices."""
        most = min(MOST_SECONDS, 60 * self.choices.minutes * TRYING)
        while True:
            rows = load_run_config(self.config, self.settings).train.micro_batch_rows
            try:
                return run_trial(self.config, [*self.settings, *data], most)
            except TrialOutOfMemoryError:
                if rows == 1:
                    raise
            self.settings = changed(self.settings, "train.micro_batch_rows", rows // 2)

    def count(self) -> Facts:
        """The table of n-grams, and what it brings without training."""
        rmtree(self.ngrams, ignore_errors=True)
        if not self.source.answers.exists():
            return {}
        target = self.choices.target
        self.index(self.source.answers)
        table = load_table(self.ngrams, vocabulary_of(tokenizer_named(target)))
        rows = read_rows(self.source.held_out)
        texts = [one["answer"] for row in rows for one in row["token_ids"]]
        kinds = {"lookup": PromptLookup(DEPTH), "n-grams": StoreLookup(table)}
        taus = {name: tokens_a_pass(kind, texts, BEST_BY) for name, kind in kinds.items()}
        shown = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
        words = ["--data", str(self.source.answers), "--target", target]
        return {
            "tau": taus, "said": [f"tau at {BEST_BY} nodes without training: {shown}"],
            "by_hand": join(["drafthead", "data", "index", *words, "--output", str(self.ngrams)]),
        }  # fmt: skip

    def index(self, data: Path) -> None:
        """Count the n-grams of some answers."""
        index.main(
            data=str(data), target=self.choices.target, output=self.ngrams, rows=options.Rows()
        )

    def train(self) -> Facts:
        """The head, for as long as there is time; a run that was killed lasts as long."""
        if not self.fact("plan", "trains") or self.left() <= 0:
            return {}
        self.source.forget()
        begun = self.trained / "run.json"
        minutes = max(LEAST_TRAINING, self.to_learn()) / 60
        if begun.exists():
            minutes = read_json(begun)["settings"]["train"]["max_minutes"]
        settings = changed(self.fact("plan", "settings"), "train.max_minutes", minutes)
        self.learn(settings)
        summary, answers = summarize(self.trained), self.fact("answers", "answers")
        writing = self.fact("answers", "tokens") / answers / self.fact("answers", "tokens_per_s")
        said = what_more_would_bring(self.trained, writing + summary.seconds / answers)
        return {
            "tokens": summary.supervised_tokens, "said": said + self.against_the_table(),
            "by_hand": join(["drafthead", "train", "--config", str(self.config), *settings]),
        }  # fmt: skip

    def learn(self, settings: Sequence[str]) -> None:
        """Train a head; raises KeyboardInterrupt where that is stopped."""
        forget_accelerate()
        if not train(load_run_config(self.config, settings)):
            raise KeyboardInterrupt
        forget_accelerate()
        rmtree(self.features, ignore_errors=True)

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
        return best_head(self.trained) if self.fact("train", "tokens") else None

    def evaluate(self) -> Facts:
        """Measure what the head accepts on held-out answers, and what trees cost here."""
        if self.head is None:
            return {}
        # Reading an answer takes no longer than learning from it.
        reading = self.left() / 2 * self.fact("plan", "learning") / self.fact("held out", "length")
        limit = int(min(200, max(LEAST, reading)))
        tau = self.measure(self.head, self.path / "evaluation.json", save=True, limit=limit)
        if self.left() > 0:
            tree.main(
                model=self.model, draft=str(self.head), batch=1, temperature=0.0,
                compile=self.choices.compile, fresh=False, output=self.path / "tree.json",
            )  # fmt: skip
        measured = {"data": self.source.held_out, "save_acceptance": True}
        return {
            "tau": tau, "said": [f"tau at {BEST_BY} nodes with the head: {tau:.2f}"],
            "by_hand": self.choices.command(f"head evaluate {quote(str(self.head))}", measured),
        }  # fmt: skip

    def measure(self, head: Path, output: Path, save: bool, limit: int = 200) -> float:
        """The tau of a head on held-out answers; `save` keeps what was accepted in its folder."""
        data = str(self.source.held_out)
        evaluate.main(
            head=head, model=self.model, data=[data], limit=limit, rows=options.Rows(),
            output=output, save_acceptance=save,
        )  # fmt: skip
        forget_accelerate()
        return float(read_json(output)["data"][data]["tau_tree"][str(BEST_BY)])

    @property
    def drafts(self) -> list[str]:
        """All that drafts, as `--draft` names it."""
        table = [f"ngrams:{self.ngrams}"] if self.ngrams.exists() else []
        return [*([str(self.head)] if self.head else []), *table, "lookup"]

    def race_size(self) -> tuple[int, int]:
        """Prompts of the race, and tokens of an answer: as many as there is time for."""
        ways = 7 if self.head else 4
        racing = max(0.0, self.left() - self.compiling("race")) / 2
        fits = int(racing / self.fact("plan", "seconds_a_token") / ways)  # tokens of each way
        tokens = min(RACED_TOKENS, self.choices.max_new_tokens, max(RACED_LEAST, fits // LEAST))
        length = min(tokens, self.fact("held out", "length"))
        return max(LEAST, int(fits / length)), tokens

    def race(self) -> Facts:
        """All ways of decoding, on as many prompts that nothing has seen as there is time for."""
        prompts, (limit, tokens) = self.source.files.test, self.race_size()
        limit = min(limit, len(read_rows(prompts)))
        rows = self.race_with(self.drafts, limit, tokens, self.raced)
        kinds = drafts_by_name(self.drafts)

        def needs(row: ComparisonRow) -> int:
            """The needs of a way of decoding, as its place in NEEDS: the last needs the most."""
            parts = [kinds[part].name for part in row.mode.split(" + ") if part in kinds]
            return max([0, *(1 + list(NEEDS).index(part) for part in parts)])

        def spoken(mode: str) -> str:
            parts = [NEEDS[kinds[p].name] if p in kinds else named(p) for p in mode.split(" + ")]
            return " with ".join(parts)

        equal = sorted(fastest(rows), key=needs)
        best = equal[0]
        verdict = headline(equal, limit, spoken)
        simpler = [row for row in rows if row.tau is not None and needs(row) < needs(best)]
        if simpler:
            other = max(simpler, key=lambda row: row.speedup_hf)
            share = other.speedup_hf / best.speedup_hf
            verdict += f"; {spoken(other.mode)} alone has {share:.0%} of that speed"
        return {
            "fastest": best.mode, "headline": verdict,
            "by_hand": self.choices.command("compare", {
                "draft": self.drafts, "compile": self.choices.compile, "prompts": prompts,
                "limit": limit, "rounds": 1, "max_new_tokens": tokens, "output": self.raced,
            }),
        }  # fmt: skip

    def race_with(
        self, drafts: list[str], limit: int, tokens: int, output: Path
    ) -> list[ComparisonRow]:
        """Race some drafts on the first prompts that nothing has seen."""
        terms = compare.Race(limit=limit, rounds=1, max_new_tokens=tokens, seed=self.choices.seed)
        compare.run_race(
            self.model, options.Drafting(draft=drafts), str(self.source.files.test), terms,
            self.choices.compile, output,
        )  # fmt: skip
        return read_race(output)[0]

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
            why = self.fact("plan", "said")
            use = Section("Use it", why, summary="commands", text="\n".join(self.commands()))
            race = replace(comparison_section(self.raced), headline=self.fact("race", "headline"))
            write_text(page, run_page(name, [], [use, race]))
            return {}
        write_text(page, report_of(self.trained, [self.raced]))
        _, foreign = read_foreign(self.head, TargetFacts())
        text = card(f"OWNER/{name}-{self.choices.family}", foreign)
        write_text(self.head / "README.md", f"{text}\n{self.fact('race', 'headline')}\n")
        (self.head / GENERATE_FILE).parent.mkdir(exist_ok=True)
        write_text(self.head / GENERATE_FILE, generate_file(str(self.head)))
        return {}

    def ending(self) -> str:
        """The last lines: what is fastest here, what to run, and where the rest is."""
        where = f"figures: {self.path}/report.html; choices: build.yaml there"
        return "\n".join([self.fact("race", "headline"), *self.commands(), where])

    def commands(self) -> list[str]:
        """The command of the fastest way of decoding."""
        drafts, target = drafts_of(self.fact("race", "fastest"), self.drafts), self.choices.target
        compiled = "" if self.choices.compile is None else f", compile={self.choices.compile}"
        how = {"draft": drafts, "compile": self.choices.compile}
        lines = [
            *(f"  {self.choices.command(verb, how)}" for verb in ("chat", "serve")),
            "  from drafthead.infer import Decoder",
            f"  decoder = Decoder.from_pretrained({target!r}, draft={drafts!r}{compiled})",
            '  print(decoder.generate(["..."], max_new_tokens=128).texts[0])',
        ]
        for server in list(self.fact("export", "servers") or ())[:1]:
            output = quote(str(self.path / "served"))
            lines.append(
                f"  drafthead head export {quote(str(self.head))} --for {server} --output {output}"
            )
        return lines


def changed(settings: Sequence[str], name: str, value: float) -> list[str]:
    """Settings in which one has another value."""
    others = [setting for setting in settings if not setting.startswith(f"{name}=")]
    return [*others, written_override(name, value)]


def best_head(trained: Path) -> Path:
    """The head to take of a run's folder: the one that drafted held-out answers best."""
    best = trained / BEST_FOLDER
    return best if best.exists() else trained


def drafts_of(mode: str, drafts: Sequence[str]) -> list[str]:
    """The drafts of a way of decoding, as `--draft` names them."""
    kinds = drafts_by_name(drafts)
    return [str(kinds.get(name, name)) for name in mode.split(" + ") if name != PLAIN]


def forget_accelerate() -> None:
    """Let the next user of accelerate choose its own number type: one process, several jobs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
