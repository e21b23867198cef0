"""The evidence of `verify`: a table, notes and the verdict, and a JSON file."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from drafthead.core.sampling import SamplingConfig
from drafthead.lab.exactness.exactness import Evidence, LaterTokens, rounding_doubt
from drafthead.lab.exactness.goodness_of_fit import Fit, chance_of_worse, detectable, freedom
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.reports.report import Report, Table

POWER = 0.9
SMALL_DOUBT = 1e-3  # total variation per token below which rounding is not mentioned
LISTED_DIFFERENCES = 10
FOUND = f"found in {POWER:.0%}"
COLUMNS = ("test", "samples", "cells", "p-value", "total variation", "by chance", FOUND)


def evidence_report(evidence: Evidence, sampling: SamplingConfig, about: dict[str, Any]) -> Report:
    """Table, notes and verdict; `about` holds machine, versions, command and settings."""
    parts = {part: fits for part, fits in evidence.parts.items() if fits}
    found = {part: detectable(fits, evidence.level, POWER) for part, fits in parts.items()}
    rows = [
        [
            part,
            str(sum(each.samples for each in fits)),
            str(freedom(fits) + len(fits)),
            f"{chance_of_worse(fits):.3g}",
            mean_over_samples(fits, "total_variation"),
            mean_over_samples(fits, "expected_total_variation"),
            f"{found[part]:.4f}" if found[part] < 1 else "nothing",
        ]
        for part, fits in parts.items()
    ]
    notes, failures = notes_on(evidence, sampling, about["prompts"]), evidence.failures()
    content = {
        **about,
        "verdict": "FAIL" if failures else "PASS",
        "failures": failures,
        "false_alarm": evidence.false_alarm,
        "power": POWER,
        "parts": {
            part: {
                "p_value": chance_of_worse(fits),
                "detectable": min(1.0, found[part]),
                "experiments": [asdict(each) for each in fits],
            }
            for part, fits in parts.items()
        },
        "greedy": [asdict(each) for each in evidence.greedy],
        "same_bits": evidence.same_bits,
        "drawn": None if evidence.drawn is None else [asdict(each) for each in evidence.drawn],
        "notes": notes,
    }
    table = Table("decoded answers and the target's distribution", COLUMNS, rows)
    return Report([table], [*notes, verdict(evidence, about["verifier"])], content)


def mean_over_samples(fits: Sequence[Fit], figure: str) -> str:
    """The mean of a figure of experiments, each as often as it has samples."""
    total = sum(each.samples * getattr(each, figure) for each in fits)
    return f"{total / sum(each.samples for each in fits):.4f}"


def notes_on(evidence: Evidence, sampling: SamplingConfig, answers: int) -> list[str]:
    """Sentences below the table; `answers` is the number of greedy answers."""
    worst_first = sorted(evidence.greedy, key=lambda d: -d.token_gap)
    notes = sampling_notes(evidence, evidence.later, sampling) if evidence.later else []
    if evidence.drawn is not None:
        same = answers - len(evidence.drawn)
        notes.append(f"drawn answers: {same} of {answers} equal plain decoding's for the same seed")
    return [
        *notes,
        f"greedy answers: {answers - len(worst_first)} of {answers} equal plain decoding's",
        *(greedy_note(d, evidence.is_excused(d)) for d in worst_first[:LISTED_DIFFERENCES]),
    ]


def sampling_notes(evidence: Evidence, later: LaterTokens, sampling: SamplingConfig) -> list[str]:
    """Return how far off the rule is, how much was accepted, and what rounding may hide."""
    worst = max(evidence.rule, key=lambda each: each.largest_deviation / each.standard_error)
    notes = [
        f"tables: the largest error of a probability is {worst.largest_deviation:.6f} "
        f"(standard error {worst.standard_error:.6f})",
        f"sampled answers: {later.accepted:.2f} drafted tokens accepted per step",
    ]
    if later.accepted == 0:
        notes.append("no drafted token was accepted, so sampling was hardly tested")
    doubt = rounding_doubt(evidence.starts, evidence.dtype, sampling.temperature)
    if doubt > SMALL_DOUBT:
        notes.append(
            f"{evidence.dtype}: rounding alone may change a token's distribution by a total "
            f"variation of about {doubt:.3f}; below that, neither PASS nor FAIL tests the "
            "engine: use --dtype float32"
        )
    return notes


def greedy_note(d: Divergence, is_excused: bool) -> str:
    """Return where a greedy answer differs, and whether rounding explains it."""
    return (
        f"- prompt {d.prompt}, token {d.position}: {d.token} instead of {d.plain_token}, top-2 "
        f"logit gap {d.top2_gap:.2g}, its own {d.token_gap:.2g}, rounding step "
        f"{d.rounding_step:.2g}: {'near tie' if is_excused else 'WRONG'}"
    )


def verdict(evidence: Evidence, verifier: str) -> str:
    """PASS or FAIL in one line, with the odds of a false alarm."""
    failures = evidence.failures()
    if failures:
        return f"FAIL with {verifier}: {'; '.join(failures)}"
    if evidence.later is None:
        aside = ", near ties aside" if evidence.greedy else ""
        return f"PASS with {verifier}: greedy answers are the target's own{aside}"
    found = {part: detectable(fits, evidence.level, POWER) for part, fits in evidence.parts.items()}
    deviations = ", ".join(f"{each:.3f} in {part}" for part, each in found.items() if each < 1)
    untested = ", ".join(part for part, each in found.items() if each >= 1)
    power = f"a total variation of {deviations} would have been found in {POWER:.0%} of runs, "
    gap = f"too few samples to test {untested}, "
    return (
        f"PASS with {verifier}: no difference from the target's distribution; "
        f"{power * bool(deviations)}{gap * bool(untested)}and exact decoding fails in "
        f"1 of {1 / evidence.false_alarm:g}"
    )
