"""The surroundings of the decoding loop: a limit of time, tokens for a streamer, the result."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.infer.answers.results import DecodeResult
from drafthead.infer.answers.score_record import LogprobRecord
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.request.request import Request
from drafthead.infer.request.text_pieces import texts_of


def in_time(emissions: Iterable[Emitted], run: BatchRun) -> Iterator[Emitted]:
    """The tokens of a run, until the request's time is over; then its answers end as they are.

    The clock starts with the first pass, which gives every answer at least one token.
    """
    started, limit = time.monotonic(), run.request.max_time
    for emitted in emissions:
        if limit is not None and time.monotonic() - started >= limit:
            run.end("time")
        yield emitted


def streamed(
    emissions: Iterator[Emitted], request: Request, streamer: BaseStreamer
) -> Iterator[Emitted]:
    """The tokens of a run, after a streamer had the prompt and then each token, one by one.

    Raises UserError for several answers, which do not advance together.
    """
    refuse_batch(len(request.prompts))
    streamer.put(torch.tensor([list(request.prompts[0])]))
    yield from put_tokens(emissions, streamer)


def put_tokens(emissions: Iterator[Emitted], streamer: BaseStreamer) -> Iterator[Emitted]:
    """The tokens of one answer's run, after a streamer had each."""
    for emitted in emissions:
        for token in emitted[0]:
            streamer.put(torch.tensor([token]))
        yield emitted
    streamer.end()


def refuse_batch(answers: int) -> None:
    """Raise UserError when there is more than one answer to stream."""
    if answers > 1:
        raise UserError(
            f"a streamer takes one answer, got {answers}: rows of a batch do not advance together; "
            "use steps"
        )


def result_of(run: BatchRun, tokenizer: PreTrainedTokenizerBase | None) -> DecodeResult:
    """The result of a run so far; another thread may be decoding it. Of beams: at its end."""
    rows, record, prompts = run.rows, run.record, run.request.prompts
    before = run.request.prefixes or prompts
    sequences = [list(row.tokens) for row in rows]
    found = DecodeResult(
        sequences=sequences,
        decoded=None,
        finish_reasons=[row.finish_reason for row in rows],
        prompt_lengths=list(map(len, prompts)),
        stats=run.stats,
        logprobs=(
            record.of_rows(list(map(len, sequences))) if isinstance(record, LogprobRecord) else None
        ),
    )
    if run.request.beams is not None:
        answers = run.beam_answers
        found = replace(
            found,
            sequences=[list(answer.tokens) for answer in answers],
            finish_reasons=[answer.finish_reason for answer in answers],
            prompt_lengths=[len(prompts[answer.prompt]) for answer in answers],
            scores=[answer.score for answer in answers],
        )
        before = [before[answer.prompt] for answer in answers]
    if tokenizer is None:
        return found
    return replace(found, decoded=texts_of(found.sequences, tokenizer, after=before))
