"""The results of a race: every way of decoding, counted in the same way.

A speedup is the median over rounds of a ratio within the round. Only returned tokens count. The
prompt pass is reported separately.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

import numpy as np
from numpy.typing import NDArray

from drafthead.infer import Target
from drafthead.infer.answers.results import repeated_ngram_share
from drafthead.lab.races.divergence import Divergence, divergence
from drafthead.lab.races.race import GENERATE, PLAIN, RaceRecord, bound, parts_of

RESAMPLES = 1000


@dataclass(frozen=True)
class CategoryFigures:
    """The figures of one contestant in one category; `speedup` is over plain decoding.

    None is what cannot be told, where answers end with their first token.
    """

    prompts: int
    tokens_per_second: float | None
    speedup: float | None
    tau: float | None


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the table. Speedups are medians over rounds, `*_range` their extremes.

    `speedup` is over our plain decoding, `speedup_hf` over transformers' `model.generate`. Fields
    that only our engine measures are None or empty for another engine.
    """

    mode: str
    drafter: str
    verifier: str
    tree_nodes: float | None  # on average
    temperature: float
    tokens: int
    seconds: float
    tokens_per_second: float
    prefill_seconds: float
    tau: float | None
    acceptance_by_depth: list[float]
    accept_length_counts: dict[int, int]
    draft_cost: float | None  # seconds of drafting a step / seconds of a plain step
    steps: int | None
    phase_seconds: dict[str, float]
    speedup: float
    speedup_range: tuple[float, float]
    speedup_hf: float
    speedup_hf_range: tuple[float, float]
    speedup_bound: float | None
    efficiency: float | None  # speedup / tau
    repeated_8gram_share: float
    answers_ended: float
    peak_memory_bytes: int
    categories: dict[str, CategoryFigures]  # where prompts say what kind of request they are
    # Of the speedup, over prompts; None where one batch holds them all.
    speedup_interval: tuple[float, float] | None = None


def rows_of(
    records: Sequence[RaceRecord],
    temperature: float,
    end_ids: frozenset[int],
    categories: Sequence[str | None] = (),
) -> list[ComparisonRow]:
    """The table of a race in which both baselines took part; `categories` are those of batches."""
    by_mode = {record.contestant.mode: record for record in records}
    plain, generate = by_mode[PLAIN], by_mode[GENERATE]
    places: dict[str, list[int]] = {}
    for place, category in enumerate(categories):
        if category is not None:
            places.setdefault(category, []).append(place)
    return [_row(record, plain, generate, temperature, end_ids, places) for record in records]


def _row(
    record: RaceRecord,
    plain: RaceRecord,
    generate: RaceRecord,
    temperature: float,
    end_ids: frozenset[int],
    places: dict[str, list[int]],
) -> ComparisonRow:
    batches = [batch for batches in record.answers for batch in batches]
    sequences = [sequence for batch in batches for sequence in batch.sequences]
    speedups = _ratios(record, plain)
    speedups_hf = _ratios(record, generate)
    stats, contestant, plain_stats = record.stats(), record.contestant, plain.stats()
    assert plain_stats is not None  # of our engine
    drafted = None if record is plain else stats
    return ComparisonRow(
        mode=contestant.mode,
        drafter=contestant.drafter,
        verifier=contestant.verifier,
        tree_nodes=stats.nodes_per_step if stats else None,
        temperature=temperature,
        tokens=sum(batch.decoded_tokens for batch in batches),
        seconds=sum(batch.decode_seconds for batch in batches),
        tokens_per_second=median(record.rates()),
        prefill_seconds=sum(batch.prefill_seconds for batch in batches),
        tau=stats.tau if stats else None,
        acceptance_by_depth=stats.acceptance_by_depth() if stats else [],
        accept_length_counts=dict(sorted(Counter(chain(*stats.accept_lengths)).items()))
        if stats
        else {},
        draft_cost=parts_of(drafted, plain_stats).draft if drafted else None,
        steps=stats.steps if stats else None,
        phase_seconds=stats.seconds if stats else {},
        speedup=median(speedups),
        speedup_range=(min(speedups), max(speedups)),
        speedup_hf=median(speedups_hf),
        speedup_hf_range=(min(speedups_hf), max(speedups_hf)),
        speedup_bound=bound(drafted, plain_stats) if drafted else None,
        efficiency=median(speedups) / drafted.tau if drafted else None,
        repeated_8gram_share=repeated_ngram_share(sequences),
        answers_ended=sum(bool(end_ids & {*s[-1:]}) for s in sequences) / len(sequences),
        peak_memory_bytes=record.peak_memory_bytes,
        categories={name: _category(record, plain, some) for name, some in places.items()},
        speedup_interval=_interval(record, plain),
    )


def _category(record: RaceRecord, plain: RaceRecord, places: Sequence[int]) -> CategoryFigures:
    some, baseline = record.part(places), plain.part(places)
    rounds = [*some.answers, *baseline.answers]
    if not all(any(answer.decoded_tokens for answer in answers) for answers in rounds):
        return CategoryFigures(len(places), None, None, None)
    stats, speedup = some.stats(), median(_ratios(some, baseline))
    return CategoryFigures(len(places), median(some.rates()), speedup, stats.tau if stats else None)


def _interval(record: RaceRecord, plain: RaceRecord) -> tuple[float, float] | None:
    """The central 95 % of the speedup over resampled batches (the percentile bootstrap)."""
    count = len(plain.answers[0])
    if count < 2 or record is plain:
        return None
    chosen = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))

    def rates(one: RaceRecord) -> NDArray[np.float64]:
        """Tokens a second of each resample [RESAMPLES]."""
        pairs = [[(a.decoded_tokens, a.decode_seconds) for a in each] for each in one.answers]
        tokens, seconds = np.array(pairs).sum(axis=0)[chosen].sum(axis=1).T
        return tokens / np.maximum(seconds, 1e-9)

    low, high = np.quantile(rates(record) / np.maximum(rates(plain), 1e-9), [0.025, 0.975])
    return float(low), float(high)


def _ratios(record: RaceRecord, baseline: RaceRecord) -> list[float]:
    """Speed against a baseline, round by round."""
    return [a / b for a, b in zip(record.rates(), baseline.rates(), strict=True)]


def divergences(
    records: Sequence[RaceRecord], prompts: Sequence[list[int]], target: Target
) -> list[Divergence]:
    """Return where greedy answers of the first round to prompts differ from plain decoding's."""
    plain = next(record for record in records if record.contestant.mode == PLAIN)
    return [
        divergence(record.contestant.mode, index, prompts[index], expected, sequence, target)
        for record in records
        if record is not plain
        for index, (expected, sequence) in enumerate(
            zip(plain.first_round(), record.first_round(), strict=True)
        )
        if expected != sequence
    ]
