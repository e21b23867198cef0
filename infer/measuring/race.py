"""The run of a race: every way of decoding on the same prompts, in turns.

The speed of a machine drifts, so contestants take turns batch by batch.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import psutil
import torch

from drafthead.heads.errors import UserError
from drafthead.heads.graphs.compiled import Compiled
from drafthead.infer.engine.results import DecodeStats, summed
from drafthead.infer.measuring.contestants import Answers, Contestant
from drafthead.infer.measuring.ledger import StepLedger, ledger_of


@dataclass
class Record:
    """All answers of one contestant: answers[round][batch]."""

    contestant: Contestant
    answers: list[list[Answers]] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def rates(self) -> list[float]:
        """Decoded tokens per second of each round, over all prompts."""
        return [
            sum(a.decoded_tokens for a in answers) / sum(a.decode_seconds for a in answers)
            for answers in self.answers
        ]

    def part(self, places: Sequence[int]) -> "Record":
        """The same of some of the batches, by their places."""
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
    on_answers: Callable[[int], object],
) -> list[Record]:
    """Decode every batch of prompts with every contestant, `rounds` times, in random order.

    What `prepare` was not called for is compiled and learnt meanwhile. `on_answers` is called with
    the number of answers after each batch. Raises UserError when a contestant's answers are too
    short to be timed.
    """
    records = [Record(contestant) for contestant in contestants]
    starts = [0, *accumulate(map(len, batches))]  # numbers of the batches' first prompts
    order = random.Random(seed)
    for number in range(rounds):
        for record in records:
            record.answers.append([])
        for prompts, start in zip(batches, starts, strict=False):
            for record in order.sample(records, len(records)):
                # Sampled answers change from round to round, but not from contestant to contestant.
                first_seed = seed + number * starts[-1] + start
                _take_turn(record, prompts, max_new_tokens, first_seed)
                on_answers(len(prompts))
        _refuse_short_answers(records)
    return records


def _take_turn(
    record: Record, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
) -> None:
    """Decode a batch and record the answers in the current round."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    record.answers[-1].append(undisturbed(record.contestant, prompts, max_new_tokens, seed))
    record.peak_memory_bytes = max(record.peak_memory_bytes, memory_in_use())


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
