"""Sentences about predicted speedups, and why they are not the measured ones."""

import math
from collections.abc import Mapping

from drafthead.lab.speedup_model import ChainPrediction

NOTICEABLE = 0.1  # a prediction that is further off gets a reason
LEAST = 0.03  # reasons that change the prediction by less are left out
# Of each factor: why a prediction is too high, and why it is too low.
REASONS = {
    "tokens": (
        "steps bring fewer tokens than one alpha for all depths gives",
        "steps bring more tokens than one alpha for all depths gives",
    ),
    "verify": (
        "the pass over a chain takes longer than a plain one",
        "the pass over a chain took less time than a plain one",
    ),
    "host": (
        "the code around the passes takes longer than in a plain step",
        "the code around the passes takes less time than in a plain step",
    ),
    "rest": (
        "the median of the rounds is slower than the average step",
        "the median of the rounds is faster than the average step",
    ),
}


def prediction_note(
    name: str, prediction: ChainPrediction, speedup: float, factors: Mapping[str, float]
) -> str:
    """What the formula predicts for a chain, beside what was measured.

    `factors` are those of `deviation_factors`; they give the reason where the two differ much.
    """
    p = prediction
    note = (
        f"{name}: alpha {p.alpha:.2f}, c {p.cost:.3f} per token, K {p.length}; the formula "
        f"predicts {p.speedup:.2f}x (measured {speedup:.2f}x), and {p.best_speedup:.2f}x for its "
        f"best K, {p.best_length}"
    )
    off = p.speedup / speedup - 1
    if abs(off) <= NOTICEABLE:
        return note
    ordered = sorted(factors, key=lambda reason: -abs(math.log(factors[reason])))
    named = [
        f"{REASONS[reason][factors[reason] < 1]} ({100 * (factors[reason] - 1):+.0f} %)"
        for reason in ordered
        if abs(math.log(factors[reason])) > LEAST
    ]
    return f"{note}. The prediction is {100 * off:+.0f} % off: {'; '.join(named)}"
