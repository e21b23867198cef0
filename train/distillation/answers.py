"""The target's own answers to prompts: the data that draft heads learn best from.

Each row's seed follows from its id, and the windows from the list of prompts. In a window, prompts
take the places of answers that have ended, and its rows are written together. So a run that was
killed at any moment continues with the window in which it stopped, and writes the rows that it
would have written, even where a target rounds by batch.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Any

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.train.data.conversations import VOCABULARY_COLUMN, WEIGHTS_COLUMN, Conversation
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.supervision import (
    encode_prompt,
    refuse_missing_tokens,
    unread_by_template,
)
from drafthead.train.distillation.answer_source import AnswerSource, Questions
from drafthead.train.distillation.dialogue import Dialogue, Job, question_of, user_turns
from drafthead.train.distillation.distilled_file import (
    AnswerStatistics,
    DistilledFile,
)
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


@dataclass(frozen=True)
class _Window:
    """Rows that are answered and written together."""

    number: int  # that its rows bear as `batch`
    jobs: list[Job]


def distill(
    source: AnswerSource,
    conversations: Sequence[Conversation],
    file: DistilledFile,
    left_out: LeftOut | None = None,
) -> DistillReport:
    """Add the target's answer to every user turn of every conversation to a file that is open.

    Each conversation becomes one JSON row: id, messages (each answer with `finished`: False if it
    was cut before its EOS), tokens, settings, source, and the ids of each prompt and answer. Turns
    are answered in order, later ones after the target's own earlier answers. Rows come longest
    prompt first, not in the source's order. Rows already in the file stay as they are. A shard
    answers its windows of all conversations, which must stay the same. Rows that cannot be asked
    are added to `left_out`, which is logged. Raises UserError for rows that were asked something
    else, and if no prompt can be asked or fits into the context.
    """
    settings = file.settings
    left_out = left_out or LeftOut(rows=len(conversations))
    file.start()
    common = _agree(source, file)
    file.resume()
    _refuse_changed(conversations, file)
    before = len(file.written.questions)
    jobs, too_long = _jobs(source, _to_plan(conversations, file), settings, left_out)
    left_out.tell(settings.prompts)
    if not (jobs or too_long or file.written.questions) and left_out.problems:
        raise UserError(f"no row can be used; the first: {left_out.problems[0]}")
    if too_long and len(too_long) == len(conversations):
        raise UserError(
            f"all {len(too_long)} prompts are longer than the context of {source.max_length} "
            f"tokens of {settings.target}: use shorter prompts or another target"
        )
    windows = _windows(jobs, file, len(too_long))
    _log_budget([job for window in windows for job in window.jobs], len(conversations), settings)
    already = sum(one.id in file.written.questions for one in conversations)
    shortened: list[str] = []
    with AnswerBar(sum(len(job.turns) for window in windows for job in window.jobs)) as bar:
        for window in windows:
            dialogues = [Dialogue(job, settings) for job in window.jobs]
            _answer_all(source, dialogues, settings, bar)
            _write(dialogues, window.number, file, common)
            shortened += [d.conversation.id for d in dialogues if d.is_shortened]
        file.finish()
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


def _agree(source: AnswerSource, file: DistilledFile) -> dict[str, Any]:
    """What all rows say of the target; UserError if it is no longer that of the file's rows."""
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


def _to_plan(conversations: Sequence[Conversation], file: DistilledFile) -> list[Conversation]:
    """The conversations that windows are made of: those without a row, and for a shard all."""
    if file.shard is not None:
        return list(conversations)
    known = file.written.questions.keys() | file.written.dropped.keys()
    return [conversation for conversation in conversations if conversation.id not in known]


def _jobs(
    source: AnswerSource,
    conversations: list[Conversation],
    settings: DistillSettings,
    left_out: LeftOut,
) -> tuple[list[Job], list[str]]:
    """What is to be answered, most turns and longest prompts first, and ids that do not fit."""
    jobs: list[Job] = []
    too_long: list[str] = []
    told: set[str] = set()  # places of rows, of which there may be several samples
    for conversation in conversations:
        is_first = conversation.where not in told
        told.add(conversation.where)
        arguments = settings.template_arguments | conversation.template_arguments
        try:
            turns, question = user_turns(conversation), question_of(conversation)
            prompt = encode_prompt(source.tokenizer, turns[0], conversation.where, arguments)
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
            jobs.append(Job(conversation, turns, question, arguments, len(prompt)))
    # Similar lengths share a batch, and a batch that does not fit into memory fails at once.
    jobs.sort(key=lambda job: (len(job.turns), job.prompt_length), reverse=True)
    return jobs, too_long


def _windows(jobs: list[Job], file: DistilledFile, too_long: int) -> list[_Window]:
    """The windows that are to be answered. A shard has some of all, less what it has answered.

    Raises UserError for a shard that was started with other conversations.
    """
    size = file.settings.batch_size * WINDOW
    parts = [jobs[first : first + size] for first in range(0, len(jobs), size)]
    if file.shard is None:
        number = max(file.written.batches, default=-1) + 1
        return [_Window(number + index, part) for index, part in enumerate(parts)]
    digest = hashlib.blake2b(digest_size=8)
    for job in jobs:
        digest.update(f"{job.conversation.id}\n{job.question}\n".encode())
    plan = {"windows": len(parts), "too_long": too_long, "digest": digest.hexdigest()}
    file.agree("plan", plan, "the prompts")
    return [
        _Window(number, part)
        for number, part in enumerate(parts)
        if file.shard.owns(number) and number not in file.written.batches
    ]


def _log_budget(jobs: list[Job], rows: int, settings: DistillSettings) -> None:
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


def _answer_all(
    source: AnswerSource, dialogues: list[Dialogue], settings: DistillSettings, bar: AnswerBar
) -> None:
    """Answer all turns of these dialogues, later ones after earlier ones."""
    questions: Questions = Queue()
    for number, dialogue in enumerate(dialogues):
        questions.put(dialogue.request(number, source))
    left = len(dialogues)
    for answer in source.answers(questions, settings):
        assert isinstance(answer.id, int)
        dialogue = dialogues[answer.id]
        if answer.error is not None:
            raise UserError(f"{dialogue.conversation.where}: {answer.error}")
        dialogue.take(answer, source)
        bar.count(len(answer.tokens), 1)
        following = dialogue.request(answer.id, source)
        left -= following is None
        if following is not None or not left:  # None: no more requests come
            questions.put(following)


def _write(
    dialogues: list[Dialogue], number: int, file: DistilledFile, common: dict[str, Any]
) -> None:
    """Write the rows of window `number`, without those that are dropped."""
    rows = [dialogue.row() | common for dialogue in dialogues if not dialogue.is_dropped]
    dropped = {d.conversation.id: d.question for d in dialogues if d.is_dropped}
    file.append(number, rows, dropped)
