"""Results of decoding: token ids, texts, and what was noted of them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias, TypeVar

from drafthead.core.errors import UserError
from drafthead.infer.engine.stats import DecodeStats
from drafthead.infer.request.stopping import FinishReason

# Ends that an answer reaches by what it says.
OWN_ENDS = ("end_token", "stop_string", "stopping_criteria")


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
    """Output that is decoded while you iterate; `async for` decodes in another thread."""

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
        """The next piece; the event loop runs meanwhile."""
        # No future can hold a StopIteration.
        pieces = await asyncio.to_thread(lambda: [*islice(self, 1)])
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    @property
    def result(self) -> DecodeResult:
        """The tokens decoded so far, as `Decoder.generate` returns them."""
        result = self._result()
        if not self.closed:
            return result
        return replace(result, finish_reasons=[r or "cancelled" for r in result.finish_reasons])

    def close(self) -> None:
        """Stop decoding and free the memory. Another thread may call this during a step."""
        self.closed = True
        self.pieces = iter(())


TextStream: TypeAlias = Stream[str]  # the text of one answer


def repeats(sequence: Sequence[int], n: int = 8) -> list[bool]:
    """Marks of the tokens that complete an n-gram that occurred in the sequence before.

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
