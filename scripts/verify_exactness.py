"""`drafthead verify-exactness`: is what this pair decodes what the target alone would have said?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import DEFAULT_CHAIN, Decoder
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.measuring.divergence import Divergence
from drafthead.infer.measuring.exactness import (
    Evidence,
    LaterTokens,
    SampledPair,
    Start,
    greedy_differences,
    is_near_tie,
    later_tokens,
    rounding_doubt,
    sampled_start,
)
from drafthead.infer.measuring.goodness_of_fit import Fit, chance_of_worse, freedom, surely_found
from drafthead.infer.measuring.rule_law import fit_of_rule
from drafthead.infer.measuring.target_law import LENGTH
from drafthead.infer.request.prompts import encode_one
from drafthead.infer.verifiers import Verifier, verifier_for
from drafthead.scripts import options
from drafthead.scripts.measuring import describe_run, prompt_ids

PROMPTS = (
    "Tell me about the sea.",
    "What is 17 times 23?",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""',
    "Translate to French: Where is the station?",
)
TABLES, BATCHES = 4, 8  # random tables, and times ROWS samples of each
POWER = 0.99
SMALL_DOUBT = 1e-3  # total variation a token that is not worth mentioning
LISTED_DIFFERENCES = 10
COLUMNS = ("test", "samples", "cells", "p-value", "total variation", "by chance", "surely found")
WIDE = 110  # columns of the table where no terminal says how many there are


def main(
    target: options.TargetName,
    head: options.HeadFolder = None,
    draft_model: options.DraftModelName = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    temperature: Annotated[
        float, typer.Option(help="Of sampled answers; 0 tests greedy answers alone.")
    ] = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    verifier: Annotated[
        str,
        typer.Option(
            help="Rule for sampled answers: auto is what decoding takes for trees of one size, "
            "rejection, or match with --compile; typical and lenient are lossy and fail."
        ),
    ] = "auto",
    prompts: Annotated[
        str | None, typer.Option(help="JSONL, Parquet or data set; a few short ones by default.")
    ] = None,
    limit: options.PromptLimit = 4,
    samples: Annotated[
        int, typer.Option(help="Times that the first tokens behind each prompt are sampled.")
    ] = 256,
    answers: Annotated[int, typer.Option(help="Whole sampled answers to each prompt.")] = 32,
    max_new_tokens: options.MaxNewTokens = 48,
    tree_nodes: Annotated[int, typer.Option(help="Nodes of every proposal, root included.")] = 16,
    draft_tokens: options.DraftTokens = DEFAULT_CHAIN,
    compile: Annotated[
        bool, typer.Option(help="Test compiled passes; the reference is never compiled.")
    ] = False,
    false_alarm: Annotated[
        float, typer.Option(help="Chance that exact decoding is called inexact.")
    ] = 1e-3,
    output: Annotated[
        Path | None, typer.Option(help="JSON file for all that was measured.")
    ] = None,
    seed: options.Seed = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16 or auto. In 16 bits the target's own law changes with "
            "the shape of a pass, which blurs the test."
        ),
    ] = "float32",
    device: options.DeviceName = "auto",
) -> None:
    """Test whether decoding with a drafter says what the target alone would have said.

    Four tests: the rule on random tables of which the law is known; the first tokens of sampled
    answers, and all later ones, against the target's law, computed by plain passes; greedy answers
    against plain decoding. "Surely found" is the total variation from the target's law that would
    have been noticed with 99 % chance. One of --head, --draft-model and --prompt-lookup is needed.
    The exit status is 0 for PASS and 1 for FAIL.
    """
    check_options(samples, answers, limit, max_new_tokens, false_alarm)
    if head is None and draft_model is None and not prompt_lookup:
        raise UserError("choose one of head, draft_model and prompt_lookup: they are to be tested")
    sampling = SamplingConfig(temperature, top_k, top_p)
    rule = verifier_for(verifier, temperature, follows=compile)
    decoder = Decoder.from_pretrained(
        target, head, draft_model, prompt_lookup, tree_nodes, draft_tokens, dtype, device,
        compile=compile,
    )  # fmt: skip
    ids = tested_prompts(prompts, limit, decoder, max_new_tokens)
    pair = Pair(decoder, rule, sampling, seed)
    evidence = pair.evidence(ids, samples, answers, max_new_tokens, false_alarm)
    notes = notes_on(evidence, sampling, len(ids))
    print_evidence(evidence, notes, rule.name)
    if output is not None:
        tested = {"prompts": len(ids), "max_new_tokens": max_new_tokens}
        about = {**describe_run(target, pair.reference), **pair.settings, **tested}
        write_evidence(evidence, notes, about, output)
    if evidence.failures():
        raise typer.Exit(1)


class Pair:
    """What is tested, and the tests with their progress bars."""

    def __init__(self, decoder: Decoder, rule: Verifier, sampling: SamplingConfig, seed: int):
        self.decoder, self.rule, self.sampling, self.seed = decoder, rule, sampling, seed
        # The model as it is loaded, never compiled.
        self.reference = Target(decoder.target.model, decoder.tokenizer)
        self.sampled = SampledPair(decoder, self.reference, sampling, rule.name)

    @property
    def settings(self) -> dict[str, object]:
        """What decides what is drawn and verified."""
        assert self.decoder.budget is not None
        return {
            "verifier": self.rule.name,
            "sampling": asdict(self.sampling),
            "tree_nodes": self.decoder.budget.nodes,
            "compile": isinstance(self.decoder.target, CompiledTarget),
            "seed": self.seed,
        }

    def evidence(
        self,
        prompts: list[list[int]],
        samples: int,
        answers: int,
        length: int,
        false_alarm: float,
    ) -> Evidence:
        """All tests, one after the other; at temperature 0 greedy answers alone."""
        drawn = not self.sampling.greedy
        return Evidence(
            self.reference.dtype,
            false_alarm,
            rule=self.test_rule() if drawn else [],
            starts=self.test_starts(prompts, samples) if drawn else [],
            later=self.test_later(prompts, answers, length) if drawn else None,
            greedy=self.test_greedy(prompts, length),
        )

    def test_rule(self) -> list[Fit]:
        """The rule alone, on random tables."""
        with tqdm(total=TABLES * BATCHES, desc="rule on tables", unit="batch") as bar:
            return [
                fit_of_rule(self.rule, self.seed + table, BATCHES, bar.update)
                for table in range(TABLES)
            ]

    def test_starts(self, prompts: list[list[int]], samples: int) -> list[Start]:
        """The first tokens behind each prompt."""
        with tqdm(total=len(prompts) * samples, desc="first tokens", unit="answer") as bar:
            return [
                sampled_start(
                    self.sampled, prompt, samples, self.seed + number * samples, bar.update
                )
                for number, prompt in enumerate(prompts)
            ]

    def test_later(self, prompts: list[list[int]], answers: int, length: int) -> LaterTokens:
        """All tokens of longer answers."""
        with tqdm(total=len(prompts) * answers, desc="later tokens", unit="answer") as bar:
            return later_tokens(self.sampled, prompts, answers, length, self.seed, bar.update)

    def test_greedy(self, prompts: list[list[int]], length: int) -> list[Divergence]:
        """Greedy answers."""
        with tqdm(total=len(prompts), desc="greedy answers", unit="answer") as bar:
            return greedy_differences(self.decoder, self.reference, prompts, length, bar.update)


def tested_prompts(
    source: str | None, limit: int, decoder: Decoder, length: int
) -> list[list[int]]:
    """The tokens of the user's prompts, or of a few short ones."""
    if source is None:
        return [encode_one(text, decoder.tokenizer) for text in PROMPTS[:limit]]
    return prompt_ids(source, limit, decoder, length)


def check_options(
    samples: int, answers: int, limit: int, max_new_tokens: int, false_alarm: float
) -> None:
    """Raise UserError for numbers that test nothing."""
    if samples < 100 or answers < 1 or limit < 1 or max_new_tokens < LENGTH:
        raise UserError(
            f"at least 100 samples, 1 answer, 1 prompt and {LENGTH} new tokens are needed, got "
            f"{samples}, {answers}, {limit} and {max_new_tokens}"
        )
    if not 0 < false_alarm < 1:
        raise UserError(f"false_alarm is a chance between 0 and 1, got {false_alarm}")


def fit_cells(name: str, fits: list[Fit], false_alarm: float) -> list[str]:
    """One line of the table: experiments together, variations as means over them."""
    samples = sum(each.samples for each in fits)

    def mean(values: list[float]) -> str:
        weighted = zip(values, fits, strict=True)
        return f"{sum(value * each.samples for value, each in weighted) / samples:.4f}"

    return [
        name,
        str(samples),
        str(freedom(fits) + len(fits)),
        f"{chance_of_worse(fits):.3g}",
        mean([each.total_variation for each in fits]),
        mean([each.expected_total_variation for each in fits]),
        f"{surely_found(fits, false_alarm, POWER):.4f}",
    ]


def table_rows(evidence: Evidence) -> list[list[str]]:
    """The statistical tests, one line each."""
    return [fit_cells(part, fits, evidence.level) for part, fits in evidence.parts.items() if fits]


def notes_on(evidence: Evidence, sampling: SamplingConfig, answers: int) -> list[str]:
    """Sentences that the table needs beside it."""
    notes = []
    if evidence.later is not None:
        worst = max(evidence.rule, key=lambda each: each.largest_deviation / each.standard_error)
        notes.append(
            f"tables: the probability that is furthest off is off by {worst.largest_deviation:.6f} "
            f"(standard error {worst.standard_error:.6f})"
        )
        accepted = evidence.later.accepted
        notes.append(f"sampled answers: {accepted:.2f} drafted tokens accepted a step")
        if accepted == 0:
            notes.append("nothing that was drafted was accepted, so sampling was hardly tested")
        doubt = rounding_doubt(evidence.starts, evidence.dtype, sampling.temperature)
        if doubt > SMALL_DOUBT:
            notes.append(
                f"{evidence.dtype}: rounding alone may move the law of a token by a total "
                f"variation of about {doubt:.3f}, so up to there neither PASS nor FAIL says "
                "anything about the engine: use --dtype float32"
            )
    differing = evidence.greedy
    notes.append(f"greedy answers: {answers - len(differing)} of {answers} equal plain decoding's")
    notes += [
        f"- prompt {d.prompt}, token {d.position}: {d.token} instead of {d.plain_token}, top-2 "
        f"logit gap {d.top2_gap:.2g}, its own {d.token_gap:.2g}, rounding step "
        f"{d.rounding_step:.2g}: {'near tie' if is_near_tie(d, evidence.dtype) else 'WRONG'}"
        for d in sorted(differing, key=lambda d: -d.token_gap)[:LISTED_DIFFERENCES]
    ]
    return notes


def verdict(evidence: Evidence, verifier: str) -> str:
    """PASS or FAIL in one line, with the odds of a false alarm."""
    failures = evidence.failures()
    if failures:
        return f"FAIL with {verifier}: {'; '.join(failures)}"
    if evidence.later is None:
        aside = ", near ties aside" if evidence.greedy else ""
        return f"PASS with {verifier}: greedy answers are the target's own{aside}"
    found = ", ".join(
        f"{surely_found(fits, evidence.level, POWER):.3f} in {part}"
        for part, fits in evidence.parts.items()
    )
    return (
        f"PASS with {verifier}: no difference from the target's law; a total variation of {found} "
        f"would have been found in {POWER:.0%} of runs, and exact decoding fails in "
        f"1 of {1 / evidence.false_alarm:g}"
    )


def print_evidence(evidence: Evidence, notes: list[str], verifier: str) -> None:
    """Show table, notes and verdict in the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if rows := table_rows(evidence):
        table = Table(box=SIMPLE_HEAD)
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in (*notes, verdict(evidence, verifier)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def write_evidence(
    evidence: Evidence, notes: list[str], about: dict[str, object], path: Path
) -> None:
    """Write all that was measured as JSON; `about` says machine, versions, command, settings."""
    failures = evidence.failures()
    content = {
        **about,
        "verdict": "FAIL" if failures else "PASS",
        "failures": failures,
        "false_alarm": evidence.false_alarm,
        "power": POWER,
        "parts": {
            part: {
                "p_value": chance_of_worse(fits),
                "surely_found": min(1.0, surely_found(fits, evidence.level, POWER)),
                "experiments": [asdict(each) for each in fits],
            }
            for part, fits in evidence.parts.items()
            if fits
        },
        "greedy": [asdict(each) for each in evidence.greedy],
        "notes": notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")
