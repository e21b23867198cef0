"""Checks all entries of a leaderboard, then trains each in its own process."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from drafthead.heads.base import head_family
from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import decoder_for
from drafthead.infer.drafters.model_drafter import load_draft_model, model_drafter
from drafthead.lab.races.record import prompt_ids
from drafthead.train.data.conversations import read_conversations
from drafthead.train.features.reading import check_row_length
from leaderboard.config import Board, Entry

STOPPED = 130  # exit status of a training that was stopped and can be continued


def check_board(board: Board) -> dict[str, int]:
    """Raise UserError for whatever could stop a leaderboard after hours of training.

    Models, prompts and data are read, and each head is made with the target's sizes, but without
    memory. Returns the number of trained parameters of each entry.
    """
    sources = {board.data.train, board.data.validation}
    if board.race.prompts in sources:
        raise UserError(
            f"race.prompts is {board.race.prompts}, which heads are trained or measured on: "
            "race on another file"
        )
    target = Target.from_pretrained(board.target.name, board.target.dtype)
    prompt_ids(
        board.race.prompts, board.race.limit, decoder_for(target, None, None, False),
        board.race.max_new_tokens,
    )  # fmt: skip
    if board.race.draft_model is not None:
        small = load_draft_model(board.race.draft_model, target, board.target.dtype)
        model_drafter(small, target, board.race.draft_tokens)
    for entry in board.entries:
        data = entry.run.data
        sources |= {*data.sources, *([data.validation] if data.validation else [])}
    for source in sorted(sources):
        if next(iter(read_conversations(source, limit=1)), None) is None:
            raise UserError(f"{source} holds no conversation")
    return {entry.name: check_entry(entry, target) for entry in board.entries}


def check_entry(entry: Entry, target: Target) -> int:
    """The number of parameters that an entry trains; raises UserError when it cannot be trained."""
    run = entry.run
    try:
        run.train.accumulation(1)
        check_row_length(target, run.target.name, run.data.max_length)
        run.folder().status(run.train.overwrite)
        family = head_family(run.family)
        with torch.device("meta"):
            head = family(family.sized(run.head, target))
    except UserError as error:
        raise UserError(f"entries.{entry.name}: {error}") from error
    return sum(p.numel() for p in head.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Trained:
    """The outcome of training all entries."""

    any_new: bool  # whether any entry was not finished before
    stopped: bool  # whether training was stopped before the last entry was finished


def train_entries(board: Board) -> Trained:
    """Train the entries that are not finished, one after the other, and print which begins."""
    minutes = board.train.minutes
    total = f"{minutes * len(board.entries):g} minutes of training in all"
    print(f"{len(board.entries)} heads, {total}, then the race", flush=True)
    any_new = False
    for number, entry in enumerate(board.entries, 1):
        folder = entry.run.folder()
        status = folder.status(entry.run.train.overwrite)
        about = f"entry {number} of {len(board.entries)}, {entry.name}"
        if status == "finished":
            print(f"{about}: trained already", flush=True)
            continue
        any_new = True
        begins = "continues" if status == "resumable" else "begins"
        print(f"{about}: training of {minutes:g} minutes {begins}", flush=True)
        if not train_in_process(entry):
            return Trained(any_new, stopped=True)
    return Trained(any_new, stopped=False)


def train_in_process(entry: Entry) -> bool:
    """Train one entry in its own process; False when it was stopped and can be continued.

    Raises UserError when training failed; the process has printed why.
    """
    module = "drafthead.train.train_heads"
    command = [sys.executable, "-m", module, "--config", str(entry.config), *entry.settings]
    with interrupting_terminate(), subprocess.Popen(command) as process:
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                # A terminal has signalled the child already; a second signal does no harm.
                process.send_signal(signal.SIGINT)
    if status == STOPPED:
        return False
    if status != 0:
        raise UserError(
            f"training {entry.name} failed, for the reason above; finished heads are kept, and the "
            "same command continues"
        )
    return True


@contextmanager
def interrupting_terminate() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that it is passed on to the training process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
