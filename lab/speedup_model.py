"""Predictions of the speed of speculative decoding, from the times of its parts.

Leviathan et al. (2023, arXiv 2211.17192) call the chance that a drafted token is accepted alpha,
the length of a chain gamma (here K, `length`), and the cost of a drafted token, in passes of the
target, c. Chen et al. (2023, arXiv 2302.01318) accept by the same rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_CHAIN = 16


@dataclass(frozen=True)
class ChainPrediction:
    """Leviathan et al.'s model of a chain (2023, arXiv 2211.17192, theorem 3.8)."""

    alpha: float  # chance that a drafted token is accepted, taken as independent of depth
    cost: float  # seconds of one drafted token / seconds of one target pass
    speedup: float  # for the chain that was run
    best_length: int  # 0 is plain decoding
    best_speedup: float
    length: int  # tokens of the chain that was run


def accepted_and_tried(accept_lengths: Sequence[int], length: int) -> tuple[int, int]:
    """Drafted tokens of chains of `length` tokens, from accept lengths (bonus included).

    A chain of 4 with accept length 3 tried 3 tokens and accepted 2.
    """
    return sum(n - 1 for n in accept_lengths), sum(min(n, length) for n in accept_lengths)


def expected_tokens(alpha: float, length: int) -> float:
    """(1 - alpha^(K+1)) / (1 - alpha): tokens of a step with K drafted ones (equation 1)."""
    return length + 1 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def chain_speedup(alpha: float, length: int, cost: float) -> float:
    """(1 - alpha^(K+1)) / ((1 - alpha)(K c + 1)) for a chain of K drafted tokens (theorem 3.8)."""
    return expected_tokens(alpha, length) / (length * cost + 1)


def operations_factor(alpha: float, length: int, cost: float) -> float:
    """(1 - alpha)(K c^ + K + 1) / (1 - alpha^(K+1)): arithmetic per token over plain decoding's.

    `cost`, c^, is that of one drafted token over that of the target's for one (theorem 3.11).
    """
    return (length * cost + length + 1) / expected_tokens(alpha, length)


def best_length(speedup: Callable[[int], float], longest: int) -> int:
    """The K from 0 (plain decoding) to `longest` with the largest speedup, the first of equals."""
    return max(range(longest + 1), key=speedup)


def predict_chain(
    accept_lengths: list[int], length: int, cost: float, longest: int = MAX_CHAIN
) -> ChainPrediction:
    """Leviathan's prediction from accept lengths (bonus included) of chains of `length` tokens.

    alpha is accepted / tried. The best length is one of 0 to `longest`.
    """
    accepted, tried = accepted_and_tried(accept_lengths, length)
    alpha = accepted / tried if tried else 0.0
    best = best_length(lambda k: chain_speedup(alpha, k, cost), longest)
    return ChainPrediction(
        alpha,
        cost,
        chain_speedup(alpha, length, cost),
        best,
        chain_speedup(alpha, best, cost),
        length,
    )


@dataclass(frozen=True)
class StepParts:
    """The time of a step by parts, in plain steps: a plain step's own parts add up to 1."""

    draft: float
    verify: float  # the pass of the target
    host: float  # accepting, committing, and the Python code around the phases

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.verify + self.host


def deviation_factors(
    prediction: ChainPrediction, tau: float, step: StepParts, plain: StepParts
) -> dict[str, float]:
    """Say why a predicted speedup is not the measured one: factors whose product is their quotient.

    The formula predicts expected tokens / (1 + K c). A factor above 1 made the prediction too high:
    `tokens` are expected ones / `tau` (acceptance that changes with depth, answers that end inside
    a step), `verify` what the pass takes beyond a plain one, `host` what the code around it takes
    beyond a plain step's. The measured speedup is tau / `step.total`.
    """
    assumed = 1 + prediction.length * prediction.cost
    verified = assumed + step.verify - plain.verify
    return {
        "tokens": expected_tokens(prediction.alpha, prediction.length) / tau,
        "verify": verified / assumed,
        "host": step.total / verified,
    }
