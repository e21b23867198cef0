"""The run of a race: every way of decoding on the same prompts, in turns, and what a step takes.

The speed of a machine drifts, so contestants take turns batch by batch. A file keeps what a race
has decoded, so that after a stop it goes on.
"""

import json
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch
from pydantic import TypeAdapter
from tqdm import tqdm

from drafthead.backends.cuda.recorded import Recorded
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.storage.files import json_lines, write_text
from drafthead.infer import DecodeStats
from drafthead.infer.answers.results import summed
from drafthead.lab.speedup_model import StepParts

STEP_PHASES = ("draft", "verify", "accept", "commit")
# Time of a step outside its phases: the planner, the loop itself, the caller that takes the tokens.
HOST = "host"


def seconds_of(stats: DecodeStats) -> dict[str, float]:
    """The phases of an average step, and the rest of it under HOST; together they are the step.

    On a GPU kernels go on running after their phase has ended: their time then counts in the phase
    that waits for them, which is `accept`. The step as a whole is right on every device. A compiled
    step under `greedy` or `match` accepts within the graph of its pass, and small drafts are made
    there too: it is all `verify`. Raises UserError if no step was counted.
    """
    if not stats.steps:
        raise UserError(
            "no answer goes beyond its first token, so there is no step to account for: allow more "
            "new tokens, or use other prompts"
        )
    seconds = {phase: stats.seconds[phase] / stats.steps for phase in STEP_PHASES}
    return seconds | {HOST: stats.decode_seconds / stats.steps - sum(seconds.values())}


def parts_of(stats: DecodeStats, plain: DecodeStats) -> StepParts:
    """A step in steps of plain decoding."""
    own, whole = seconds_of(stats), sum(seconds_of(plain).values())
    host = own["accept"] + own["commit"] + own[HOST]
    return StepParts(*(part / whole for part in (own["draft"], own["verify"], host)))


def bound(stats: DecodeStats, plain: DecodeStats) -> float:
    """tau over the step's phases in plain steps: the speedup, if nothing took time but them."""
    own = seconds_of(stats)
    return stats.tau * sum(seconds_of(plain).values()) / sum(own[phase] for phase in STEP_PHASES)


PLAIN, GENERATE = "plain", "generate"  # the two baselines' modes
THEIR_RULE = "transformers"  # the verifier of transformers' own decoding


@dataclass(frozen=True)
class RacedAnswers:
    """One batch of prompts decoded once; tokens and seconds of decoding exclude the prompt pass."""

    sequences: list[list[int]]  # new tokens of each prompt, with the end token if it was reached
    decoded_tokens: int  # of all rows
    decode_seconds: float
    prefill_seconds: float
    stats: DecodeStats | None = None  # of our engine


@dataclass(frozen=True)
class Contestant(ABC):
    """A way of decoding with a name that is unique in a comparison."""

    mode: str
    drafter: str
    sampling: SamplingConfig
    verifier: str = field(default="auto", kw_only=True)

    def prepare(self, batch_size: int) -> None:  # noqa: B027  (nothing is a good default)
        """Do what must not happen while answers to so many prompts at a time are timed."""

    @abstractmethod
    def decode(self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int) -> RacedAnswers:
        """Decode a batch of prompts; the seed is that of the first row."""


class RaceTurn(NamedTuple):
    """A contestant's answers to a batch of prompts, and the memory that was in use."""

    answers: RacedAnswers
    peak_memory_bytes: int


Turns: TypeAlias = Mapping[str, RaceTurn]  # of one batch, by the contestants' modes
TURNS = TypeAdapter(dict[str, RaceTurn])


class RaceBatch(NamedTuple):
    """The identity of a batch of a race."""

    temperature: float
    round: int
    batch: int


class UnfinishedRace:
    """The batches that all contestants have decoded: a line of the file for each.

    A batch counts only when the last contestant has decoded it, since they are compared in the same
    minutes. The first line holds what the race is made of.
    """

    def __init__(self, path: Path, made_of: dict[str, Any]):
        """Go on with what the file holds of the same race; anything else begins again.

        `changed` are the names of what is no longer as it was in the file, if there is one.
        """
        self.path = path
        self.batches: dict[RaceBatch, Turns] = {}
        wanted = json.loads(json.dumps(made_of))
        there = [*json_lines(path)]
        first = there[0] if there and isinstance(there[0], dict) else {}
        self.changed = [name for name in {**wanted, **first} if wanted.get(name) != first.get(name)]
        self.begun = bool(there)
        kept = [] if self.changed else there[1:]
        for place, turns in kept:
            self.batches[RaceBatch(*place)] = TURNS.validate_python(turns)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole lines only: what a stop has cut off would spoil the next line.
        write_text(path, "".join(json.dumps(line) + "\n" for line in (wanted, *kept)))

    def add(self, place: RaceBatch, turns: Turns) -> None:
        """Keep a batch that all contestants have decoded."""
        self.batches[place] = turns
        line = [place, {mode: [asdict(answers), peak] for mode, (answers, peak) in turns.items()}]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def end(self) -> None:
        """The race is over, and its report is written: the next one begins from nothing."""
        self.path.unlink(missing_ok=True)


@dataclass
class RaceRecord:
    """All answers of one contestant: answers[round][batch]."""

    contestant: Contestant
    answers: list[list[RacedAnswers]] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def add(self, turn: RaceTurn) -> None:
        """Record the answers to the next batch of the current round."""
        self.answers[-1].append(turn.answers)
        self.peak_memory_bytes = max(self.peak_memory_bytes, turn.peak_memory_bytes)

    def rates(self) -> list[float]:
        """Decoded tokens per second of each round, over all prompts."""
        return [
            sum(a.decoded_tokens for a in answers) / sum(a.decode_seconds for a in answers)
            for answers in self.answers
        ]

    def first_round(self) -> list[list[int]]:
        """The answers of the first round, prompt by prompt."""
        return [sequence for batch in self.answers[0] for sequence in batch.sequences]

    def part(self, places: Sequence[int]) -> "RaceRecord":
        """This record, restricted to the batches at the given places."""
        answers = [[answers[place] for place in places] for answers in self.answers]
        return RaceRecord(self.contestant, answers, self.peak_memory_bytes)

    def stats(self) -> DecodeStats | None:
        """The engine's statistics of all rounds, added up; None for another engine."""
        stats = [a.stats for answers in self.answers for a in answers if a.stats is not None]
        return summed(stats) if stats else None


def in_batches(prompts: Sequence[list[int]], size: int) -> list[Sequence[list[int]]]:
    """The prompts in batches of a size, in order; the last one may be smaller."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def prepare(
    contestant: Contestant, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
) -> None:
    """Compile and time what the first answers to a batch would, and decode a few tokens of it."""
    contestant.prepare(len(prompts))
    contestant.decode(prompts, min(16, max_new_tokens), seed)


def race(
    contestants: Sequence[Contestant],
    batches: Sequence[Sequence[list[int]]],
    rounds: int,
    max_new_tokens: int,
    seed: int,
    unfinished: UnfinishedRace | None = None,
) -> list[RaceRecord]:
    """Decode every batch of prompts with every contestant, `rounds` times, in random order.

    What `prepare` was not called for is compiled and learnt meanwhile. `unfinished` keeps answers;
    batches that it has of the same contestants are not decoded again. Raises UserError when a
    contestant's answers are too short to be timed.
    """
    records = [RaceRecord(contestant) for contestant in contestants]
    starts = [0, *accumulate(map(len, batches))]  # numbers of the batches' first prompts
    order = random.Random(seed)
    temperature, modes = contestants[0].sampling.temperature, {c.mode for c in contestants}
    total = rounds * starts[-1] * len(contestants)
    with tqdm(total=total, desc=f"temperature {temperature:g}", unit="answer") as bar:
        for number in range(rounds):
            for record in records:
                record.answers.append([])
            for batch, prompts in enumerate(batches):
                place = RaceBatch(temperature, number, batch)
                found = {} if unfinished is None else unfinished.batches.get(place, {})
                turns = dict(found) if found.keys() == modes else {}
                is_new = not turns
                # Sampled answers change from round to round, not from contestant to contestant.
                first_seed = seed + number * starts[-1] + starts[batch]
                for record in order.sample(records, len(records)):
                    mode = record.contestant.mode
                    if is_new:
                        turns[mode] = _turn(record.contestant, prompts, max_new_tokens, first_seed)
                    record.add(turns[mode])
                    bar.update(len(prompts))
                if is_new and unfinished is not None:
                    unfinished.add(place, turns)
            _refuse_short_answers(records)
    return records


def _turn(
    contestant: Contestant, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
) -> RaceTurn:
    """Decode a batch, and see how much memory is in use."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return RaceTurn(undisturbed(contestant, prompts, max_new_tokens, seed), memory_in_use())


def _refuse_short_answers(records: Sequence[RaceRecord]) -> None:
    for record in records:
        if not any(answer.decoded_tokens for answer in record.answers[-1]):
            raise UserError(
                f"no answer of {record.contestant.mode} goes beyond its first tokens, so there is "
                "no decoding to time: allow more new tokens, or use other prompts"
            )


def undisturbed(
    contestant: Contestant, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
) -> RacedAnswers:
    """The answers to a batch, decoded again as long as a function had to be recorded for it."""
    while True:
        before = Recorded.made
        answers = contestant.decode(prompts, max_new_tokens, seed)
        if Recorded.made == before:
            return answers


def memory_in_use() -> int:
    """Peak bytes of the GPU since the last reset, or of the whole process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process(os.getpid()).memory_info().rss
