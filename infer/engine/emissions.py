"""What passes around the decoding loop: a limit of time, and tokens for a streamer."""

import time
from collections.abc import Iterator

import torch
from transformers.generation.streamers import BaseStreamer

from drafthead.heads.errors import UserError
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.request.request import Request


def in_time(emissions: Iterator[Emitted], run: BatchRun) -> Iterator[Emitted]:
    """What a run emits, until the request's time is over; then its answers end as they are.

    The clock starts with the first pass, which gives every answer at least one token.
    """
    started, limit = time.monotonic(), run.request.max_seconds
    for emitted in emissions:
        if limit is not None and time.monotonic() - started >= limit:
            run.batch.end("time")
        yield emitted


def streamed(
    emissions: Iterator[Emitted], request: Request, streamer: BaseStreamer
) -> Iterator[Emitted]:
    """What a run emits, after a streamer had the prompt and then each token, one by one.

    Raises UserError for several answers, which do not advance together.
    """
    refuse_batch(len(request.prompts))
    streamer.put(torch.tensor([list(request.prompts[0])]))
    yield from put_tokens(emissions, streamer)


def put_tokens(emissions: Iterator[Emitted], streamer: BaseStreamer) -> Iterator[Emitted]:
    """What the run of one answer emits, after a streamer had each token."""
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
