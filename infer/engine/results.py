"""What decoding returns: token ids, texts, and an account of every pass of the target."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.profiler import record_function

PHASES = ("prefill", "draft", "verify", "accept", "commit")


@dataclass
class DecodeStats:
    """Counts and seconds of one `generate` call.

    A step is one verification pass of the target over the whole batch; the prompt pass, which gives
    each row its first token, is no step.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    decode_seconds: float = 0.0  # wall clock of all that follows the prompt pass
    steps: int = 0
    verified_nodes: int = 0  # nodes of a row's tree, the root included, added up over steps
    # For each row: tokens that each of its steps committed, bonus included, before the answer was
    # cut at its end or limit.
    accept_lengths: list[list[int]] = field(default_factory=list)
    # For each row: tokens returned after the first.
    decoded_tokens: list[int] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall-clock time of the block to a phase.

        On a GPU kernels run on after the block has been left: their time shows up in the phase
        that waits for them, which is the one that reads the accepted tokens.
        """
        started = time.perf_counter()
        # A profiler's mark takes as long as other small parts of a step, so only where it is seen.
        seen = torch.autograd._profiler_enabled()
        with record_function(f"drafthead::{name}") if seen else nullcontext():
            yield
        self.seconds[name] += time.perf_counter() - started

    @contextmanager
    def step(self) -> Iterator[Callable[[], float]]:
        """Count one verification step of the batch and its wall-clock time.

        Gives a function that says how many seconds it has taken so far.
        """
        started = time.perf_counter()

        def elapsed() -> float:
            return time.perf_counter() - started

        yield elapsed
        self.decode_seconds += elapsed()
        self.steps += 1

    @property
    def tau(self) -> float:
        """Tokens returned for each pass that a row took part in; plain decoding has 1."""
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


def summed(accounts: Iterable[DecodeStats]) -> DecodeStats:
    """Several calls' accounts as one; its rows are the rows of all of them."""
    total = DecodeStats()
    for account in accounts:
        total.steps += account.steps
        total.verified_nodes += account.verified_nodes
        total.decode_seconds += account.decode_seconds
        total.accept_lengths += account.accept_lengths
        total.decoded_tokens += account.decoded_tokens
        for phase, seconds in account.seconds.items():
            total.seconds[phase] += seconds
    return total


@dataclass(frozen=True)
class DecodeResult:
    """The answers to a batch of prompts.

    `sequences` are the new token ids of each row, with the end token if it was reached; `texts` the
    same without special tokens; `finished` says which rows ended by themselves.
    """

    sequences: list[list[int]]
    texts: list[str]
    finished: list[bool]
    stats: DecodeStats


def repeats(sequence: Sequence[int], n: int = 8) -> list[bool]:
    """Which tokens complete an n-gram that stood in the sequence before.

    With n = 2, ``1 2 1 2`` repeats at its last token alone.
    """
    seen: set[tuple[int, ...]] = set()
    found = [False] * len(sequence)
    for end in range(n, len(sequence) + 1):
        ngram = tuple(sequence[end - n : end])
        found[end - 1] = ngram in seen
        seen.add(ngram)
    return found


def repeated_ngram_share(sequences: Sequence[Sequence[int]], n: int = 8) -> float:
    """Share of n-grams that stood in their own sequence before: 0 for fresh text, 1 for loops."""
    total = sum(max(0, len(sequence) - n + 1) for sequence in sequences)
    return sum(sum(repeats(sequence, n)) for sequence in sequences) / total if total else 0.0
