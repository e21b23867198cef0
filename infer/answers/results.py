"""What decoding returns: token ids, texts, and statistics of every pass of the target."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TypeAlias, TypeVar

import torch
from torch.profiler import record_function

from drafthead.heads.errors import UserError
from drafthead.infer.request.stopping import FinishReason

# Ends that an answer reaches by what it says.
OWN_ENDS = ("end_token", "stop_string", "stopping_criteria")
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


def summed(accounts: Iterable[DecodeStats]) -> DecodeStats:
    """The statistics of several decodings as one; its rows are the rows of all of them."""
    total = DecodeStats()
    for account in accounts:
        total.steps += account.steps
        total.verified_nodes += account.verified_nodes
        total.reused += account.reused
        total.decode_seconds += account.decode_seconds
        total.accept_lengths += account.accept_lengths
        total.decoded_tokens += account.decoded_tokens
        for phase, seconds in account.seconds.items():
            total.seconds[phase] += seconds
    return total


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the probabilities of one answer's tokens, one entry for each token.

    `processed` is under the distribution that the token was chosen from: after logits processors,
    temperature and filters (transformers' `scores`). At temperature 0 there are no temperature and
    filters. `raw` is under the target's own distribution (transformers' `logits`). `top` holds the
    target's own most probable tokens, as many as were asked for, best first.
    """

    processed: list[float]
    raw: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class BeamAnswer:
    """One answer that beam search has found."""

    prompt: int  # its number
    tokens: Sequence[int]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, repr=False)
class DecodeResult:
    """The answers, in the order of the prompts; several answers to one prompt follow each other.

    Answers of beam search begin with the best.
    """

    sequences: list[list[int]]  # the new token ids of each row, its end token included
    decoded: list[str] | None  # see `texts`; None without a tokenizer
    finish_reasons: list[FinishReason | None]  # None: the answer goes on, in a stream that is open
    prompt_lengths: list[int]  # tokens of each row's prompt; see `Target.as_prompt`
    stats: DecodeStats
    logprobs: list[Logprobs] | None = None  # of each row, when they were asked for
    # With num_beams, of each answer: the sum of its tokens' log-probabilities (after logits
    # processors) over its length to the power `length_penalty`; `sequences_scores` in transformers.
    scores: list[float] | None = None

    @property
    def texts(self) -> list[str]:
        """The answers as texts, without special tokens; raises UserError without a tokenizer."""
        if self.decoded is None:
            raise UserError(
                "the target has no tokenizer to turn tokens into text with: pass tokenizer= to "
                "Decoder.from_pretrained, or read sequences"
            )
        return self.decoded

    def __repr__(self) -> str:
        tokens, stats = sum(map(len, self.sequences)), self.stats
        ends = " and ".join(sorted({reason or "open" for reason in self.finish_reasons}))
        return (
            f"DecodeResult({len(self.sequences)} answers of {tokens} tokens, {ends}, "
            f"{stats.tokens_per_second:.1f} tokens/s, tau {stats.tau:.2f})"
        )

    @property
    def finished(self) -> list[bool]:
        """Whether each row reached an end of its own, and not a limit."""
        return [reason in OWN_ENDS for reason in self.finish_reasons]


Piece = TypeVar("Piece")


class Stream(Iterator[Piece]):
    """Output that is decoded while it is iterated; `async for` decodes in a thread beside."""

    def __init__(
        self, pieces: Iterator[Piece], stats: DecodeStats, result: Callable[[], DecodeResult]
    ):
        """`stats` is complete when `pieces` has ended; `result` gives the answers so far."""
        self.pieces, self.stats, self._result = pieces, stats, result
        self.closed = False

    def __next__(self) -> Piece:
        """Decode until there is one more piece."""
        return next(self.pieces)

    def __aiter__(self) -> "Stream[Piece]":
        return self

    async def __anext__(self) -> Piece:
        """As `__next__`; the event loop runs meanwhile."""
        # No future can hold a StopIteration.
        pieces = await asyncio.to_thread(lambda: [*islice(self, 1)])
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    @property
    def result(self) -> DecodeResult:
        """What has been decoded so far, as `Decoder.generate` returns it."""
        result = self._result()
        if not self.closed:
            return result
        return replace(result, finish_reasons=[r or "cancelled" for r in result.finish_reasons])

    def close(self) -> None:
        """Decode no more, and let the memory go. Another thread may do this during a step."""
        self.closed = True
        self.pieces = iter(())


TextStream: TypeAlias = Stream[str]  # the text of one answer


def repeats(sequence: Sequence[int], n: int = 8) -> list[bool]:
    """Which tokens complete an n-gram that occurred in the sequence before.

    With n = 2, only the last token of ``1 2 1 2`` completes a repeated n-gram.
    """
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(sequence)
    for end in range(n, len(sequence) + 1):
        ngram = tuple(sequence[end - n : end])
        repeated[end - 1] = ngram in seen
        seen.add(ngram)
    return repeated


def repeated_ngram_share(sequences: Sequence[Sequence[int]], n: int = 8) -> float:
    """Share of n-grams that occurred before in their sequence: 0 for fresh text, 1 for loops."""
    total = sum(max(0, len(sequence) - n + 1) for sequence in sequences)
    return sum(sum(repeats(sequence, n)) for sequence in sequences) / total if total else 0.0
