"""The target's scores of the tokens that it was given, kept for requests that ask for them.

The logits come from the passes that verified the tokens, so a record costs no pass. Requests
without one pay nothing.
"""

from collections import defaultdict
from collections.abc import Collection, Generator, Sequence
from typing import Literal

import torch

from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.infer.answers.results import Logprobs
from drafthead.infer.engine.prefill import padded, read_chunk
from drafthead.infer.request.request import TokenRecord

# Of `model.generate`'s output: whole rows after and before processors, temperature and filters.
RowKind = Literal["scores", "logits"]
SCORED = 256  # positions of a prompt that are scored at a time


class LogprobRecord(TokenRecord):
    """Log-probabilities of the chosen tokens and of the target's most probable ones."""

    def __init__(self, top: int):
        """`top` is how many of the most probable tokens are kept."""
        self.top = top
        self.rows: dict[int, Logprobs] = defaultdict(lambda: Logprobs([], [], []))

    def keep(
        self,
        number: int,
        logits: torch.Tensor,  # [P, V]
        scores: torch.Tensor,  # [P, V]
        tokens: torch.Tensor,  # [P]
    ) -> None:
        raw, processed = logits.log_softmax(-1), scores.log_softmax(-1)
        row, chosen = self.rows[number], tokens[:, None]
        row.raw.extend(raw.gather(1, chosen)[:, 0].tolist())
        row.processed.extend(processed.gather(1, chosen)[:, 0].tolist())
        best = raw.topk(min(self.top, raw.shape[1]), dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        row.top.extend(list(zip(*pair, strict=True)) for pair in pairs)

    def part(self, number: int, start: int, count: int) -> Logprobs:
        """The record of some tokens of row `number`, from place `start` on."""
        row, end = self.rows[number], start + count
        return Logprobs(row.processed[start:end], row.raw[start:end], row.top[start:end])

    def of_rows(self, lengths: Sequence[int]) -> list[Logprobs]:
        """The record of each row, cut to the length of its answer."""
        return [self.part(number, 0, length) for number, length in enumerate(lengths)]


class RowRecord(TokenRecord):
    """Whole rows of processed scores or of logits, which need V numbers for each token."""

    def __init__(self, kinds: Collection[RowKind]):
        self.kinds = kinds
        # Of each row number and kind the [V] of each token.
        self.rows: dict[int, dict[RowKind, list[torch.Tensor]]]
        self.rows = defaultdict(lambda: defaultdict(list))

    def keep(
        self,
        number: int,
        logits: torch.Tensor,  # [P, V]
        scores: torch.Tensor,  # [P, V]
        tokens: torch.Tensor,  # [P]
    ) -> None:
        for kind in self.kinds:
            rows = scores if kind == "scores" else logits
            # Clones: a view would keep the rest of the batch in memory.
            self.rows[number][kind].extend(row.clone() for row in rows)

    def by_token(self, kind: RowKind, rows: int, length: int) -> tuple[torch.Tensor, ...]:
        """[B, V] for each of the first `length` tokens, of `rows` rows; 0 after a row's end."""
        first = self.rows[0][kind][0]
        none = torch.zeros_like(first)
        kept = [self.rows[number][kind][:length] for number in range(rows)]
        padded = [[*row, *[none] * (length - len(row))] for row in kept]
        return tuple(torch.stack(column) for column in zip(*padded, strict=True))


def scored_prompt(
    target: Target, prompt: Sequence[int], top: int
) -> Generator[None, None, Logprobs]:
    """The log-probabilities of a prompt's tokens but the first, which follows nothing.

    `top` is how many of the most probable tokens are given beside each. Each time that the
    generator is asked it reads `SCORED` positions; the last time it returns them.
    """
    record = LogprobRecord(top)
    cache, features = target.new_cache(), FeatureSpec().with_last()
    ids, _ = padded([prompt], target.device)
    target.begin(cache, len(prompt) + 1)
    for start in range(0, len(prompt), SCORED):
        end = min(start + SCORED, len(prompt))
        with torch.no_grad():
            read = read_chunk(target, ids, start, end, features, cache, room=1)
            assert read.last is not None
            following = ids[0, start + 1 : end + 1]  # one less at the end
            logits = target.project(read.last[0, : len(following)]).float()
            record.keep(0, logits, logits, following)
        yield
    return record.rows[0]
