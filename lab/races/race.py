"""The run of a race: every way of decoding on the same prompts, in turns.

The speed of a machine drifts, so contestants take turns batch by batch.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import psutil
import torch
from tqdm import tqdm

from drafthead.backends.compiled import Compiled
from drafthead.heads.errors import UserError
from drafthead.infer.engine.results import DecodeStats, summed
from drafthead.lab.races.contestants import Answers, Contestant
from drafthead.lab.races.ledger import StepLedger, ledger_of
from drafthead.lab.races.unfinished_race import Place, Turn, UnfinishedRace


@dataclass
class Record:
    """All answers of one contestant: answers[round][batch]."""

    contestant: Contestant
    answers: list[list[Answers]] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def add(self, turn: Turn) -> None:
        """Record the answers to the next batch of the current round."""
        self.answers[-1].append(turn.answers)
        self.peak_memory_bytes = max(self.peak_memory_bytes, turn.peak_memory_bytes)

    def rates(self) -> list[float]:
        """Decoded tokens per second of each round, over all prompts."""
        return [
            sum(a.decoded_tokens for a in answers) / sum(a.decode_seconds for a in answers)
            for answers in self.answers
        ]

    def part(self, places: Sequence[int]) -> "Record":
        """This record, restricted to the batches at the given places."""
        answers = [[answers[place] for place in places] for answers in self.answers]
        return Record(self.contestant, answers, self.peak_memory_bytes)

    def stats(self) -> DecodeStats | None:
        """The engine's statistics of all rounds, added up; None for another engine."""
        stats = [a.stats for answers in self.answers for a in answers if a.stats is not None]
        return summed(stats) if stats else None

    def ledger(self) -> StepLedger:
        """Where the time of the steps of our engine went; raises UserError without any step."""
        stats = self.stats()
        assert stats is not None, "another engine has no ledger"
        return ledger_of(stats)


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
) -> list[Record]:
    """Decode every batch of prompts with every contestant, `rounds` times, in random order.

    What `prepare` was not called for is compiled and learnt meanwhile. `unfinished` keeps answers;
    batches that it has of the same contestants are not decoded again. Raises UserError when a
    contestant's answers are too short to be timed.
    """
    records = [Record(contestant) for contestant in contestants]
    starts = [0, *accumulate(map(len, batches))]  # numbers of the batches' first prompts
    order = random.Random(seed)
    temperature, modes = contestants[0].sampling.temperature, {c.mode for c in contestants}
    total = rounds * starts[-1] * len(contestants)
    with tqdm(total=total, desc=f"temperature {temperature:g}", unit="answer") as bar:
        for number in range(rounds):
            for record in records:
                record.answers.append([])
            for batch, prompts in enumerate(batches):
                place = Place(temperature, number, batch)
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
) -> Turn:
    """Decode a batch, and see how much memory is in use."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return Turn(undisturbed(contestant, prompts, max_new_tokens, seed), memory_in_use())


def _refuse_short_answers(records: Sequence[Record]) -> None:
    for record in records:
        if not any(answer.decoded_tokens for answer in record.answers[-1]):
            raise UserError(
                f"no answer of {record.contestant.mode} goes beyond its first tokens, so there is "
                "no decoding to time: allow more new tokens, or use other prompts"
            )


def undisturbed(
    contestant: Contestant, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
) -> Answers:
    """The answers to a batch, decoded again as long as a graph had to be compiled for it."""
    while True:
        before = Compiled.made
        answers = contestant.decode(prompts, max_new_tokens, seed)
        if Compiled.made == before:
            return answers


def memory_in_use() -> int:
    """Peak bytes of the GPU since the last reset, or of the whole process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process(os.getpid()).memory_info().rss
