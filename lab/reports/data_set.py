"""Conversations with what training supervises of them, and statistics of data and of answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import NO_ARGUMENTS, TemplateArguments
from drafthead.lab.reports.report import Table, print_table
from drafthead.train.data.conversations import Conversation
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.sequences import SupervisedTokens
from drafthead.train.data.supervision import (
    Rendering,
    mark_answers,
    special_ids,
    supervised_sequences,
    unread_by_template,
)
from drafthead.train.distillation.answers import DistillReport
from drafthead.train.distillation.distilled_file import AnswerStatistics

SUPERVISED, CONTEXT, EDGE = "bold green", "dim", "red"


@dataclass(frozen=True)
class DataSummary:
    """Lengths of the usable sequences in tokens, and what is wrong with the others."""

    with_ids: int  # rows that hold the token ids of their answers
    lengths: list[int]
    supervised: list[int]
    without_end: int  # rows whose last supervised token is no control token
    left_out: LeftOut


def summarise(
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
    left_out: LeftOut,
    template_arguments: TemplateArguments = NO_ARGUMENTS,
) -> DataSummary:
    """Mark every conversation; rows that training leaves out are added to `left_out`."""
    lengths, supervised = [], []
    without_end = 0
    controls = special_ids(tokenizer)
    for conversation in conversations:
        try:
            sequences = supervised_sequences(tokenizer, conversation, template_arguments)
        except UserError as error:
            left_out.leave(UnusableRowError(str(error)))
            continue
        left_out.note_unread(unread_by_template(tokenizer, conversation))
        for marked in sequences:
            emitted = [i for i, learnt in zip(marked.input_ids, marked.mask, strict=True) if learnt]
            lengths.append(len(marked.input_ids))
            supervised.append(len(emitted))
            without_end += emitted[-1] not in controls
    with_ids = sum(conversation.tokens is not None for conversation in conversations)
    return DataSummary(with_ids, lengths, supervised, without_end, left_out)


def runs(marked: SupervisedTokens, token_by_token: bool) -> list[tuple[list[int], bool]]:
    """Neighbouring tokens of the same kind, or every token alone, each with its mask.

    Ids 5 6 7 with mask 0 1 1 make the runs ([5], 0) and ([6, 7], 1).
    """
    pairs = zip(marked.input_ids, marked.mask, strict=True)
    if token_by_token:
        return [([token], learnt) for token, learnt in pairs]
    return [([token for token, _ in run], learnt) for learnt, run in groupby(pairs, itemgetter(1))]


def paint(
    tokenizer: PreTrainedTokenizerBase,
    marked: SupervisedTokens,
    show_tokens: bool,
    colour: bool,
) -> Text:
    """The rendered conversation; supervised text is coloured or, without colour, in brackets."""
    text = Text()
    for ids, learnt in runs(marked, show_tokens):
        piece = str(tokenizer.decode(ids, skip_special_tokens=False))
        if learnt and not colour:
            piece = f"⟦{piece}⟧"
        text.append(piece, style=SUPERVISED if learnt else CONTEXT)
        if show_tokens:
            text.append("|", style=EDGE)
    return text


def summary_table(summary: DataSummary, title: str) -> Table:
    """The statistics as a table of two columns."""
    total, learnt = sum(summary.lengths), sum(summary.supervised)
    rows = [
        ("rows", f"{summary.left_out.rows:,}"),
        ("rows with the ids that the target generated", f"{summary.with_ids:,}"),
        ("rows that training leaves out", str(summary.left_out.unusable)),
    ]
    if total:
        rows += [
            ("tokens", f"{total:,}"),
            ("supervised tokens", f"{learnt:,} ({learnt / total:.1%})"),
            ("rows whose last answer lacks an end-of-turn", str(summary.without_end)),
        ]
        for name, values in (
            ("tokens a sequence", summary.lengths),
            ("supervised", summary.supervised),
        ):
            shown = np.percentile(values, [0, 50, 90, 99, 100]).round().astype(int)
            rows.append((f"{name}: min, 50 %, 90 %, 99 %, max", ", ".join(map(str, shown))))
    return Table(title, ("of the data", ""), rows)


def show_conversations(
    console: Console,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
    show_tokens: bool,
    template_arguments: TemplateArguments,
) -> None:
    """Print conversations, or why nothing can be learnt of them."""
    for conversation in conversations:
        ids = "text only" if conversation.tokens is None else "token ids as generated"
        console.print(Text(f"{conversation.id} ({conversation.where}), {ids}", style="bold"))
        try:
            sequences = sequences_to_show(tokenizer, conversation, template_arguments)
        except UserError as error:
            console.print(Text(str(error), style=EDGE))
            continue
        for marked in sequences:
            console.print(paint(tokenizer, marked, show_tokens, console.is_terminal), end="\n\n")


def sequences_to_show(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    template_arguments: TemplateArguments,
) -> list[SupervisedTokens]:
    """The part of a conversation that training reads; of a text also with nothing to learn."""
    if conversation.tokens is None:
        rendering = Rendering.of(tokenizer, conversation, template_arguments)
        return [mark_answers(rendering, conversation.messages)]
    return supervised_sequences(tokenizer, conversation)


NAMED = 10  # ids that a note gives; the others are only counted
WORDS = {
    "end_token": "ended by their end token",
    "length": "cut at the limit (raise --max-new-tokens)",
    "stopping_criteria": "ended where they repeat themselves",
}


def some(ids: Sequence[str]) -> str:
    """The first ids of several."""
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")


def answer_rows(statistics: AnswerStatistics, dropped: int) -> list[tuple[str, str]]:
    """Return how long the answers of a file are, and how they ended."""
    lengths = statistics.lengths
    rows = [("rows", f"{statistics.rows:,}"), ("answers", f"{len(lengths):,}")]
    if lengths:
        middle, long = np.percentile(lengths, [50, 95])
        rows += [
            ("tokens", f"{sum(lengths):,}"),
            ("tokens an answer: median, 95 %, most", f"{middle:.0f}, {long:.0f}, {max(lengths)}"),
        ]
    for reason, words in WORDS.items():
        if count := statistics.ended[reason]:
            rows.append((f"answers {words}", f"{count:,} ({count / len(lengths):.1%})"))
    if statistics.from_text:
        rows.append(("rows whose ids were made of a server's text", f"{statistics.from_text:,}"))
    if dropped:
        rows.append(("rows left out, as an answer was cut", f"{dropped:,}"))
    return rows


def print_report(report: DistillReport, path: Path) -> None:
    """Print what was written, figures of all answers in the file, and what was left out."""
    speed = report.tokens / report.seconds if report.seconds else 0.0
    notes = [
        f"{report.written:,} rows written, {report.already_done:,} were there before; "
        f"{report.tokens:,} tokens at {speed:,.0f} tokens/s"
    ]
    if report.too_long:
        notes.append(
            f"{len(report.too_long):,} prompts longer than the context were skipped: "
            f"{some(report.too_long)}"
        )
    if report.shortened:
        notes.append(
            f"{len(report.shortened):,} conversations lost later turns that did not fit into the "
            f"context, or that the chat template refused: {some(report.shortened)}"
        )
    rows = answer_rows(report.statistics, report.dropped)
    print_table(Table(str(path), ("of the file", ""), rows), notes)
