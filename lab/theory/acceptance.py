"""alpha, the chance that a drafted token is accepted, counted from decoding, with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafthead.lab.speedup_model import accepted_and_tried

RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Share:
    """A share of tries, and the interval that holds the true one in 95 % of all measurements."""

    value: float
    low: float
    high: float
    tries: int

    def holds(self, value: float) -> bool:
        """Tell whether a value lies within the interval."""
        return self.low <= value <= self.high


def share_of(accepted: Sequence[float], tried: Sequence[int], seed: int = 0) -> Share:
    """The share of accepted tries, from the sums over each answer; 0 where nothing was tried.

    The interval is the percentile bootstrap over answers (Efron, 1979): answers are drawn with
    replacement, for tokens of one answer depend on each other, so that an interval which takes all
    tokens for independent (Wilson's) is too narrow. It is too narrow as well for few answers: below
    ten or so it is a rough guide, and of a single answer it is a point.
    """
    gains, tries = np.array(accepted, float), np.array(tried, float)
    if not tries.sum():
        return Share(0.0, 0.0, 0.0, 0)
    drawn = np.random.default_rng(seed).integers(len(tries), size=(RESAMPLES, len(tries)))
    sums = tries[drawn].sum(1)
    shares = gains[drawn].sum(1)[sums > 0] / sums[sums > 0]
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(shares, [outside, 1 - outside])
    return Share(float(gains.sum() / tries.sum()), float(low), float(high), int(tries.sum()))


def counted_alpha(accept_lengths: Sequence[Sequence[int]], length: int) -> Share:
    """alpha of chains of `length` tokens: accepted / tried in all of each answer's steps."""
    accepted, tried = zip(*(accepted_and_tried(n, length) for n in accept_lengths), strict=True)
    return share_of(accepted, tried)


def counted_by_depth(accept_lengths: Sequence[Sequence[int]], length: int) -> list[Share]:
    """alpha_k for k from 1 to `length`: how often depth k was accepted when depth k - 1 was.

    Accept lengths 1, 3, 2, 1 of chains of 2 accepted 0, 2, 1, 0: alpha_1 = 2/4, alpha_2 = 1/2.
    """
    return [
        share_of(
            [sum(n > depth for n in answer) for answer in accept_lengths],
            [sum(n >= depth for n in answer) for answer in accept_lengths],
        )
        for depth in range(1, length + 1)
    ]
