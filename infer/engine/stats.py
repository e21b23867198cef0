"""Statistics of a decoding: counts and seconds of every pass of the target."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.profiler import record_function

PHASES = ("prefill", "draft", "verify", "accept", "commit")


@dataclass
class DecodeStats:
    """Counts and seconds of one decoding.

    A step is one verification pass of the target over the whole batch. The prompt pass, which gives
    each row its first token, does not count as a step. In beam search a row is a prompt, and its
    tokens are rounds: each makes all of its beams one token longer.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    decode_seconds: float = 0.0  # wall clock of everything after the prompt pass
    steps: int = 0
    verified_nodes: int = 0  # nodes of a row's tree, the root included, summed over steps
    reused: int = 0  # positions of all prompts that were read before, see `Decoder.remember`
    # For each row: tokens that each of its steps committed, bonus included, before the answer was
    # cut at its end or limit.
    accept_lengths: list[list[int]] = field(default_factory=list)
    # For each row: tokens returned after the first.
    decoded_tokens: list[int] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall-clock time of the block to a phase.

        On a GPU, kernels may still run when the block ends. Their time counts for the phase that
        waits for them, which is the one that reads the accepted tokens.
        """
        started = time.perf_counter()
        # A profiler range costs as much as other small parts of a step: only while profiling.
        profiled = torch.autograd._profiler_enabled()
        with record_function(f"drafthead::{name}") if profiled else nullcontext():
            yield
        self.seconds[name] += time.perf_counter() - started

    @contextmanager
    def step(self) -> Iterator[Callable[[], float]]:
        """Count one verification step of the batch and its wall-clock time.

        The block gets a function that returns the seconds since the step began.
        """
        started = time.perf_counter()

        def elapsed() -> float:
            return time.perf_counter() - started

        yield elapsed
        self.decode_seconds += elapsed()
        self.steps += 1

    @property
    def tau(self) -> float:
        """Tokens returned per pass that a row took part in; plain decoding has 1."""
        passes = sum(map(len, self.accept_lengths))
        return sum(self.decoded_tokens) / passes if passes else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens returned after the first of each row, per second of decoding."""
        return sum(self.decoded_tokens) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Nodes that the target scored in one row and pass, on average; plain decoding has 1."""
        return self.verified_nodes / self.steps if self.steps else 1.0

    def acceptance_by_depth(self) -> list[float]:
        """alpha_k: how often depth k was accepted when depth k - 1 was, for k = 1, 2, ...

        Accept lengths 1, 3, 2, 1 mean 0, 2, 1, 0 accepted drafts: alpha_1 = 2/4, alpha_2 = 1/2.
        """
        drafts = [length - 1 for row in self.accept_lengths for length in row]
        deepest = max(drafts, default=0)
        reached = [sum(d >= depth for d in drafts) for depth in range(deepest + 1)]
        return [after / before for before, after in pairwise(reached)]
