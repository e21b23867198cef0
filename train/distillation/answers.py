"""The target's own answers to prompts: the data that draft heads learn best from.

Each row's seed follows from its id, and the windows from the list of prompts. In a window, prompts
take the places of answers that have ended, and its rows are written together, windows in order. So
a run that was killed at any moment continues with the first window that is not written, and writes
the rows that it would have written, even where a target rounds by batch, and whoever answers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.train.data.conversations import VOCABULARY_COLUMN, WEIGHTS_COLUMN, Conversation
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.supervision import (
    Rendering,
    refuse_missing_tokens,
    unread_by_template,
)
from drafthead.train.distillation.answer_source import AnswerSource, AnswersPrompts
from drafthead.train.distillation.dialogue import Dialogue, DialogueJob, question_of, user_turns
from drafthead.train.distillation.distilled_file import AnswerStatistics, DistilledFile
from drafthead.train.distillation.windows import WindowSource, answered
from drafthead.train.jobs.console import AnswerBar
from drafthead.train.settings import DistillSettings

logger = logging.getLogger(__name__)

WINDOW = 8  # batches: at the end of a window rows are idle, and a kill loses what it had answered


@dataclass(frozen=True)
class DistillReport:
    """The report of a run: what it did, and what the file holds after it."""

    already_done: int  # rows
    written: int  # rows
    tokens: int  # generated
    seconds: float
    too_long: tuple[str, ...]  # ids of rows whose first prompt leaves no room in the context
    shortened: tuple[str, ...]  # ids of rows whose later turns did not fit and were left out
    dropped: int  # rows of the file that were left out because an answer was cut
    statistics: AnswerStatistics  # of the whole file


def distill(
    source: AnswerSource | WindowSource,
    conversations: Sequence[Conversation],
    file: DistilledFile,
    left_out: LeftOut | None = None,
) -> DistillReport:
    """Add the target's answer to every user turn of every conversation to a file that is open.

    Each conversation becomes one JSON row: id, messages (each answer with `finished`: False if it
    was cut before its EOS), tokens, settings, source, and the ids of each prompt and answer. Turns
    are answered in order, later ones after the target's own earlier answers. Rows come longest
    prompt first, not in the source's order. Rows already in the file stay as they are. Rows that
    cannot be asked are added to `left_out`, which is logged. Raises UserError for rows that were
    asked something else, and if no prompt can be asked or fits into the context.
    """
    settings = file.settings
    left_out = left_out or LeftOut(rows=len(conversations))
    file.start()
    common = _agree(source, file)
    file.resume()
    _refuse_changed(conversations, file)
    before = len(file.written.questions)
    known = file.written.questions.keys() | file.written.dropped.keys()
    missing = [one for one in conversations if one.id not in known]
    jobs, too_long = _jobs(source, missing, settings, left_out)
    left_out.tell(settings.prompts)
    if not (jobs or too_long or file.written.questions) and left_out.problems:
        raise UserError(f"no row can be used; the first: {left_out.problems[0]}")
    if too_long and len(too_long) == len(conversations):
        raise UserError(
            f"all {len(too_long)} prompts are longer than the context of {source.max_length} "
            f"tokens of {settings.target}: use shorter prompts or another target"
        )
    _log_budget(jobs, len(conversations), settings)
    already = sum(one.id in file.written.questions for one in conversations)
    shortened: list[str] = []
    size, begun = settings.batch_size * WINDOW, max(file.written.batches, default=-1) + 1
    windows = [jobs[first : first + size] for first in range(0, len(jobs), size)]
    there = file.written.statistics.ended.total()  # answers
    with AnswerBar(there + sum(len(job.turns) for job in jobs), there) as bar:
        for number, dialogues in enumerate(answered(source, windows, settings, bar.count), begun):
            _write(dialogues, number, file, common)
            shortened += [d.conversation.id for d in dialogues if d.is_shortened]
        return DistillReport(
            already,
            len(file.written.questions) - before,
            bar.tokens,
            bar.seconds,
            tuple(too_long),
            tuple(shortened),
            len(file.written.dropped),
            file.written.statistics,
        )


def _agree(source: AnswersPrompts, file: DistilledFile) -> dict[str, Any]:
    """The columns about the target; UserError if it is no longer the one of the file's rows."""
    vocabulary = {VOCABULARY_COLUMN: vocabulary_of(source.tokenizer)}
    weights = source.weights()
    if weights is None:
        return vocabulary
    file.agree("weights", weights, f"the weights of {file.settings.target}")
    return {WEIGHTS_COLUMN: weights} | vocabulary


def _refuse_changed(conversations: Sequence[Conversation], file: DistilledFile) -> None:
    """Raise UserError if a row answers another question than is asked now."""
    known = file.written.questions | file.written.dropped
    for conversation in conversations:
        question = known.get(conversation.id)
        if question is not None and question != question_of(conversation):
            raise UserError(
                f"{conversation.where} is not what row {conversation.id} of {file.path} answers: "
                "the prompts have changed; choose another --output, or --overwrite to start again"
            )


def _jobs(
    source: AnswersPrompts,
    conversations: list[Conversation],
    settings: DistillSettings,
    left_out: LeftOut,
) -> tuple[list[DialogueJob], list[str]]:
    """The jobs, most turns and longest prompts first, and the ids of prompts that do not fit."""
    jobs: list[DialogueJob] = []
    too_long: list[str] = []
    told: set[str] = set()  # places of rows, of which there may be several samples
    for conversation in conversations:
        is_first = conversation.where not in told
        told.add(conversation.where)
        rendering = Rendering.of(source.tokenizer, conversation, settings.template_arguments)
        try:
            turns, question = user_turns(conversation), question_of(conversation)
            prompt = rendering.ids(turns[0], add_generation_prompt=True)
            refuse_missing_tokens(prompt, source.vocab_size, source.tokenizer, conversation.where)
        except UnusableRowError as error:
            if is_first:
                left_out.leave(error)
            continue
        if is_first:
            left_out.note_unread(unread_by_template(source.tokenizer, conversation))
        if source.max_length is not None and len(prompt) >= source.max_length:
            too_long.append(conversation.id)
        else:
            arguments = rendering.template_arguments
            jobs.append(DialogueJob(conversation, turns, question, arguments, len(prompt)))
    # Similar lengths share a batch, and a batch that does not fit into memory fails at once.
    jobs.sort(key=lambda job: (len(job.turns), job.prompt_length), reverse=True)
    return jobs, too_long


def _log_budget(jobs: list[DialogueJob], rows: int, settings: DistillSettings) -> None:
    answers = sum(len(job.turns) for job in jobs)
    longest = max((job.prompt_length for job in jobs), default=0)
    logger.info(
        "%d of %d conversations to answer: %d answers, at most %s new tokens; longest prompt %d; "
        "at most %d at a time",
        len(jobs),
        rows,
        answers,
        f"{answers * settings.max_new_tokens:,}",
        longest,
        settings.batch_size,
    )


def _write(
    dialogues: list[Dialogue], number: int, file: DistilledFile, common: dict[str, Any]
) -> None:
    """Write the rows of window `number`, without those that are dropped."""
    rows = [dialogue.row() | common for dialogue in dialogues if not dialogue.is_dropped]
    dropped = {d.conversation.id: d.question for d in dialogues if d.is_dropped}
    file.append(number, rows, dropped)
