"""Random cases against `model.generate` and plain decoding: `python tests/differential.py`.

`--seed N` repeats one case; `--first N --count M` tries many, and counts what they were. A mismatch
is printed with its seed and with the shortest case that still shows it. Where the two best choices
of the reference lie closer than rounding, a difference is a near-tie: counted apart, not a fault.
"""

import argparse
import logging
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import session_folder  # before transformers is imported, which looks for the user's home

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from case_answers import Built, Mismatch, is_refused, own_settings
from case_checks import CHECKS
from cases import Case, default_of, drawn
from steady import steady_clock

from drafthead.core.errors import UserError

# Why a head cannot be made for a target that plain decoding answers with.
NO_HEAD = ("has no MTP layer", "carries several streams")
SECONDS = 15  # in which a case is cut
KEPT = ("seed", "way", "prompts", "new", "temperature", "rule", "filters")  # shortened otherwise


def mismatches(case: Case) -> list[Mismatch]:
    """What is wrong with a case; raises UserError where plain decoding refuses it too."""
    try:
        built = Built(case)
        with own_settings(case, built.model):
            try:
                return [*CHECKS[case.way](case, built)]
            except UserError as error:
                if any(reason in str(error) for reason in NO_HEAD) or refused_alike(case, built):
                    raise
                return [Mismatch(f"refused: {error}")]
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-5:]]
        return [Mismatch(f"{type(error).__name__} at {' '.join(places)}: {error}")]


def refused_alike(case: Case, built: Built) -> bool:
    """Whether plain decoding refuses one of the rows."""
    rows = [(case, prompt, case.seed + row) for row, prompt in enumerate(case.prompts)]
    return any(is_refused(own, built, prompt, seed) for own, prompt, seed in rows)


def shortest(case: Case, end: float | None = None) -> Case:
    """The case without all that it need not have to be wrong, as far as is found in time."""
    end = end or time.monotonic() + SECONDS
    for simpler in (*without_rows(case), *without_settings(case), *with_less_text(case)):
        if time.monotonic() > end:
            break
        with suppress(UserError):
            if any(not each.near for each in mismatches(simpler)):
                return shortest(simpler, end)
    return case


def without_rows(case: Case) -> Iterator[Case]:
    """Cases that lack a prompt."""
    for number in range(len(case.prompts) if len(case.prompts) > 1 else 0):
        yield replace(case, prompts=(*case.prompts[:number], *case.prompts[number + 1 :]))


def without_settings(case: Case) -> Iterator[Case]:
    """Cases that lack a setting."""
    for one in fields(case):
        if one.name not in KEPT and getattr(case, one.name) != default_of(one):
            yield replace(case, **{one.name: default_of(one)})
    if case.temperature:
        yield replace(case, temperature=0.0, rule="auto", filters={})
    if case.rule != "auto":
        yield replace(case, rule="auto")
    for name in ("filters", "processors"):
        given: Mapping[str, Any] = getattr(case, name)
        for left_out in given:
            yield replace(case, **{name: {n: v for n, v in given.items() if n != left_out}})


def with_less_text(case: Case) -> Iterator[Case]:
    """Cases with half of a prompt, or half as long answers."""
    for number, prompt in enumerate(case.prompts):
        middle = len(prompt) // 2
        for half in (prompt[:middle], prompt[middle:]) if middle else ():
            prompts = (*case.prompts[:number], half, *case.prompts[number + 1 :])
            yield replace(case, prompts=prompts)
    if case.new > 1:
        yield replace(case, new=case.new // 2)


@dataclass
class Tally:
    """What cases were, and what became of them."""

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(self, seed: int) -> list[str]:
        """Try the case of a seed; returns the lines about what is not as it should be."""
        case = drawn(seed)
        drafter = case.drafter.partition(":")[0] + "+" * ("+" in case.drafter)
        rule = case.rule if case.rule != "auto" else "match" if case.temperature else "greedy"
        named = {
            "way": case.way,
            "rule": rule,
            "drafter": drafter,
            "architecture": case.architecture,
        }
        self.cases.update(named.items())
        try:
            found = mismatches(case)
        except UserError as error:
            self.outcomes["refused"] += 1
            return [f"seed {seed}: refused: {str(error)[:120]}"]
        wrong = [each for each in found if not each.near]
        name = "mismatch" if wrong else "near-tie" if found else "right"
        self.outcomes[name] += 1
        if not found:
            return []
        lines = [f"seed {seed}: {name}: {case}", *(f"   {each}" for each in found[:4])]
        return [*lines, f"   shortest: {shortest(case)}"] if wrong else lines

    def __str__(self) -> str:
        lines = [f"{name}: {number}" for name, number in sorted(self.outcomes.items())]
        for kind in ("way", "rule", "drafter", "architecture"):
            counts = sorted((n, c) for (k, n), c in self.cases.items() if k == kind)
            lines.append(f"{kind}: " + ", ".join(f"{name} {count}" for name, count in counts))
        return "\n".join(lines)


def main() -> int:
    """Try some seeds; 1 where one of them has a mismatch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this case alone")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after these")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    first, count = (given.first, given.count) if given.seed is None else (given.seed, 1)
    tally, end = Tally(), time.monotonic() + 60 * given.minutes
    with steady_clock(Path(os.environ["XDG_CACHE_HOME"])):
        for seed in range(first, first + count):
            if time.monotonic() > end:
                break
            if lines := tally.run(seed):
                print("\n".join(lines), flush=True)
    print(f"{tally.cases.total() // 4} cases\n{tally}")
    return int(bool(tally.outcomes["mismatch"]))


if __name__ == "__main__":
    try:
        status = main()
    finally:
        session_folder.end_session()
    raise SystemExit(status)
