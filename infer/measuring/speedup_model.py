"""Bounds and predictions of the speed of speculative decoding, from the times of its parts."""

from dataclasses import dataclass

MAX_CHAIN = 16


def speedup_bound(
    tau: float, verify_seconds: float, draft_seconds: float, host_seconds: float, t_1: float
) -> float:
    """tau / (verify / t_1 + draft / t_1 + host / t_1): seconds per step, t_1 that of a plain step.

    The measured speedup is lower by the time outside these phases.
    """
    return tau * t_1 / (verify_seconds + draft_seconds + host_seconds)


@dataclass(frozen=True)
class ChainPrediction:
    """Leviathan et al.'s model of a chain (2023, arXiv 2211.17192, theorem 3.8)."""

    alpha: float  # chance that a drafted token is accepted, taken as independent of depth
    cost: float  # seconds of one drafted token / seconds of one target pass
    speedup: float  # for the chain that was run
    best_length: int  # of 0 (plain) to MAX_CHAIN
    best_speedup: float


def chain_speedup(alpha: float, length: int, cost: float) -> float:
    """(1 - alpha^(K+1)) / ((1 - alpha)(K c + 1)) for a chain of K drafted tokens."""
    tokens = length + 1 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)
    return tokens / (length * cost + 1)


def predict_chain(accept_lengths: list[int], length: int, cost: float) -> ChainPrediction:
    """Leviathan's prediction from accept lengths (bonus included) of chains of `length` tokens.

    alpha is accepted / tried: a chain of 4 with accept length 3 tried 3 tokens and accepted 2.
    """
    accepted = sum(n - 1 for n in accept_lengths)
    tried = sum(min(n, length) for n in accept_lengths)
    alpha = accepted / tried if tried else 0.0
    best = max(range(MAX_CHAIN + 1), key=lambda k: chain_speedup(alpha, k, cost))
    return ChainPrediction(
        alpha, cost, chain_speedup(alpha, length, cost), best, chain_speedup(alpha, best, cost)
    )
