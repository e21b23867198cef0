"""The host's account of a batch: answers, rows that still run, random numbers."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from drafthead.core.drafting.form import AnswerForm, Forms, RowForm, Wanted, form_of
from drafthead.core.errors import UserError
from drafthead.core.sampling import NO_TOKEN, RowRandom, RowSampling, SamplingConfig
from drafthead.infer.engine.stats import DecodeStats
from drafthead.infer.planning.planner import EVERYTHING, Mix
from drafthead.infer.request.request import Request
from drafthead.infer.request.stopping import FinishReason, Stop

Emitted = dict[int, list[int]]  # row number -> the tokens that it has just gained

# Rows that have ended run along idly until this share of the batch is idle: taking them out copies
# the whole cache, which must not happen each time that one of many rows ends.
IDLE_SHARE = 0.25


@dataclass
class Row:
    """One prompt's answer so far."""

    limit: int  # most new tokens
    prompt_length: int = 0  # tokens
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafts: frozenset[str] | None = None  # names of what may draft; None: all that there is
    tokens: list[int] = field(default_factory=list)
    stop: Stop | None = None  # what may end the answer besides end tokens
    finish_reason: FinishReason | None = None  # None while the row needs more tokens
    accept_lengths: list[int] = field(default_factory=list)
    reused: int = 0  # positions of the prompt that were read before
    owner: Any = None  # whose answer it is, for whoever decodes the batch
    form: AnswerForm | None = None  # that the answer has to keep to
    drafted: int = 0  # tokens that were proposed for the last step
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    # What these read: so many tokens, then the answer; [T] as far as they have read.
    prefix_length: int = 0
    past: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    @property
    def failed(self) -> bool:
        """Whether the answer would have to go on with NO_TOKEN, which ends it."""
        return self.tokens[-1:] == [NO_TOKEN]

    @property
    def active(self) -> bool:
        """Whether the row needs more tokens."""
        return self.finish_reason is None

    def take(self, committed: Sequence[int], end_ids: frozenset[int]) -> list[int]:
        """Append committed tokens up to the first end, NO_TOKEN or limit; returns those kept."""
        kept = []
        # A path may go on past an end token: what follows it was drafted for nothing.
        for token in committed:
            kept.append(token)
            self.finish_reason = self._reason_to_end(token, len(self.tokens) + len(kept), end_ids)
            if self.finish_reason is not None:
                break
        self.tokens += kept
        return kept

    def _reason_to_end(
        self, token: int, length: int, end_ids: frozenset[int]
    ) -> FinishReason | None:
        """The reason to end an answer of this length with its newest token; None if it goes on."""
        if token in end_ids or token == NO_TOKEN:
            return "end_token"
        reason = self.stop(token) if self.stop is not None else None
        return reason or ("length" if length >= self.limit else None)


def no_token_in(prompt: str, tokens: Sequence[int]) -> str:
    """A sentence about the answer `tokens`, which ends with NO_TOKEN, and what helps."""
    return (
        f"no token can be chosen after {len(tokens) - 1} new tokens of {prompt}: the "
        "target's logits are NaN or infinite, or a logits processor forbids every token; try "
        "another dtype than float16, for example float32, or a higher temperature"
    )


@dataclass(frozen=True)
class BeamAnswer:
    """One answer that beam search has found."""

    prompt: int  # its number
    tokens: Sequence[int]
    score: float
    finish_reason: FinishReason


class BatchRun:
    """A request on its way to its answers: rows, random numbers and statistics.

    The rows are in the order of the prompts; `running` are the numbers of those that are still
    decoded, in the order of the running batch.
    """

    def __init__(self, request: Request, device: torch.device):
        self.request, alike = request, (request.sampling, request.drafts)
        self.rows = [
            Row(limit, len(prompt), *alike)
            for limit, prompt in zip(request.limits, request.prompts, strict=True)
        ]
        for row, stop in zip(self.rows, request.stops, strict=False):
            row.stop = stop
        read = request.prefixes or request.prompts
        for row, processors, prefix in zip(self.rows, request.processors, read, strict=False):
            row.processors, row.prefix_length = processors, len(prefix)
            row.past = torch.tensor(list(prefix))
            row.form = form_of(processors)
        self.running = list(range(len(self.rows)))  # row numbers, by place in the running batch
        self.stats = DecodeStats()
        self._count_rows()
        self.numbers = RowRandom(request.seeds, device)
        # Of the scores of tokens; requests without one pay nothing.
        self.record = request.new_record() if request.new_record is not None else None
        self.beam_answers: Sequence[BeamAnswer] = ()  # at the end of a beam search
        self.last_lengths: list[int] = []  # tokens that the last step committed in active rows

    def _count_rows(self) -> None:
        """Give each row of the batch its place in the statistics."""
        self.stats.accept_lengths = [row.accept_lengths for row in self.rows]
        # The first token is the prompt pass's.
        self.stats.decoded_tokens = [max(0, len(row.tokens) - 1) for row in self.rows]

    def running_rows(self) -> list[Row]:
        """The rows of the running batch, idle ones among them, in its order."""
        return [self.rows[number] for number in self.running]

    def active_numbers(self) -> list[int | None]:
        """Of each row of the running batch the row number, or None if it has ended."""
        return [number if self.rows[number].active else None for number in self.running]

    @property
    def num_rows(self) -> int:
        """Rows of the running batch, or all their beams: what a step decodes at a time."""
        beams = self.request.beams
        return len(self.running) * (1 if beams is None else beams.num_beams)

    @property
    def columns(self) -> int:
        """Tokens of prompt and answer of an active row, on average; 0 if all have ended."""
        rows = [row for row in self.running_rows() if row.active]
        return sum(row.prompt_length + len(row.tokens) for row in rows) // max(1, len(rows))

    @property
    def sampling(self) -> RowSampling:
        """The distributions that each running row's tokens are drawn from."""
        return RowSampling(tuple([row.sampling for row in self.running_rows()]))

    @property
    def draft_sampling(self) -> RowSampling:
        """The distributions that each running row's children are drawn from."""
        rows = self.running_rows()
        return RowSampling(tuple([self.request.draft_sampling(row.sampling) for row in rows]))

    @property
    def wanted(self) -> Wanted:
        """Names of what may draft for each running row."""
        found = [row.drafts for row in self.running_rows()]
        return found if any(names is not None for names in found) else None

    @property
    def forms(self) -> Forms:
        """The form of each running row's answer."""
        rows = self.running_rows()
        found = [RowForm(row.form, row.tokens) if row.form and row.active else None for row in rows]
        return found if any(found) else None

    @property
    def mix(self) -> Mix:
        """Names of what may draft for active rows, and for how many eighths of them."""
        counts = Counter([row.drafts for row in self.running_rows() if row.active])
        if not counts.keys() - {None}:
            return EVERYTHING
        return frozenset((name, round(8 * n / counts.total())) for name, n in counts.items())

    @property
    def wants_drafts(self) -> bool:
        """Whether anything may draft for a row that is active."""
        rows = self.running_rows()
        return any([row.active and (row.drafts is None or bool(row.drafts)) for row in rows])

    def note_drafted(self, counts: Sequence[int]) -> None:
        """Give each running row the number of tokens that a step proposes for it."""
        for row, count in zip(self.running_rows(), counts, strict=True):
            row.drafted = count

    @property
    def greedy(self) -> bool:
        """Whether the target's most probable tokens are wanted, in all running rows."""
        return all([row.sampling.greedy for row in self.running_rows()])

    @property
    def random(self) -> RowRandom | None:
        """The random numbers of running rows; None where no row needs any."""
        return None if self.greedy else self.numbers

    def begin_random_step(self, late: torch.Tensor | None = None) -> None:
        """Start each running row's random numbers for its next token, after `late` [B] that the
        device alone knows.
        """
        # By the row's own length: its draws must not depend on when it joined a batch.
        self.numbers.begin_step([len(row.tokens) for row in self.running_rows()], late)

    def reuse(self, positions: int) -> None:
        """Note how many positions of each prompt were read before."""
        for row in self.rows:
            row.reused = positions
        self.stats.reused = positions * len(self.rows)

    def take(self, committed: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Give each active row its committed tokens; returns what was kept, by row number.

        A row whose answer would have to go on with NO_TOKEN has failed. What is cut off may have
        one: after an end token a processor may forbid every token.
        """
        return {
            number: self.rows[number].take(tokens, self.request.end_ids)
            for number, tokens in zip(self.running, committed, strict=True)
            if self.rows[number].active
        }

    def take_step(self, committed: list[list[int]]) -> Emitted:
        """Give each running row the tokens that a step committed; returns what rows kept of them.

        An answer is cut at its end token, stop string or limit.
        """
        self.last_lengths = []
        # Before rows take them: an answer that ends within the step counts whole in the planner,
        # and tau counts what was returned.
        for row, tokens in zip(self.running_rows(), committed, strict=True):
            if row.active:
                row.accept_lengths.append(len(tokens))
                self.last_lengths.append(len(tokens))
        emitted = self.take(committed)
        for number, tokens in emitted.items():
            self.stats.decoded_tokens[number] += len(tokens)
        return emitted

    def end(self, reason: FinishReason) -> None:
        """End all answers that have not ended yet."""
        for row in self.rows:
            row.finish_reason = row.finish_reason or reason
        self.running = []

    def refuse_failed(self, emitted: Emitted) -> Emitted:
        """The tokens that rows were given; raises UserError when one of them has failed."""
        for number in emitted:
            if self.rows[number].failed:
                raise UserError(no_token_in(f"prompt {number}", self.rows[number].tokens))
        return emitted

    def drop_idle(self, count: Callable[[int], int] = int) -> list[int] | None:
        """Shrink the running batch to its active rows, once `IDLE_SHARE` of the rows is idle.

        `count` is how many rows stay of so many active ones: where it is more, idle ones stay too.
        Returns the places that stay, in the batch as it was; None when all of them do.
        """
        active = [row.active for row in self.running_rows()]
        idle = active.count(False)
        if not idle or (any(active) and idle < IDLE_SHARE * len(active)):
            return None
        spare = count(len(active) - idle) - (len(active) - idle) if any(active) else 0
        if spare >= idle:
            return None
        ended = [place for place, is_active in enumerate(active) if not is_active]
        places = sorted({*range(len(active))} - {*ended[spare:]})
        self.running = [self.running[place] for place in places]
        if places:
            self.numbers.keep_rows(places)
        return places

    def add_idle(self, places: Sequence[int]) -> None:
        """Let rows run along that have ended, with the sampling of rows at some places."""
        running, rows = self.running, self.rows
        self.numbers.keep_rows([*range(len(running)), *places])
        alike = [rows[running[place]].sampling for place in places]
        running += range(len(rows), len(rows) + len(places))
        rows += [Row(limit=0, finish_reason="cancelled", sampling=each) for each in alike]
        self._count_rows()

    def join(self, other: "BatchRun", order: Sequence[int]) -> None:
        """Go on with running rows of both, see `RowState.join_rows`; other rows are forgotten.

        They are numbered again.
        """
        if self.record is not None and other.record is not None:
            records = [(run.record, number) for run in (self, other) for number in run.running]
            self.record.take_rows([records[row] for row in order])
        both = self.running_rows() + other.running_rows()
        self.rows = [both[row] for row in order]
        self.running = list(range(len(self.rows)))
        self._count_rows()
        self.numbers.join_rows(other.numbers, order)
