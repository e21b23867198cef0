"""`drafthead data inspect`: shows what training supervises, and statistics of a data set."""

from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options
from drafthead.train.data.left_out import LeftOut


def main(
    *,
    data: Annotated[
        str,
        options.OfData,
        typer.Option(
            help="Conversations: a .jsonl, .json or .parquet file, a folder or a data set."
        ),
    ],
    target: options.Named,
    limit: Annotated[int, typer.Option(min=0, help="Number of rows to show.")] = 3,
    row: Annotated[
        int | None, typer.Option(min=1, help="Show only this row; the first is 1.")
    ] = None,
    show_tokens: Annotated[
        bool, typer.Option("--show-tokens", help="Mark the ends of tokens.")
    ] = False,
    rows: options.Rows,
) -> None:
    """Show conversations and which tokens are trained on.

    These are in colour, or in ⟦ ⟧ when piped.
    """
    from rich.console import Console

    from drafthead.core.target.any_target import tokenizer_named
    from drafthead.core.target.chat_template import check_template_arguments
    from drafthead.lab.reports.data_set import show_conversations, summarise, summary_table
    from drafthead.lab.reports.report import print_table
    from drafthead.train.data.conversations import read_conversations

    left_out = LeftOut(rows.strict)
    conversations = read_conversations(data, rows.prompt_column, left_out=left_out)
    if row is not None and row > len(conversations):
        raise UserError(f"{data} has {len(conversations)} conversations, there is no row {row}")
    tokenizer = tokenizer_named(target)
    arguments = rows.template_arguments
    check_template_arguments(tokenizer, arguments)
    console = Console(highlight=False, soft_wrap=True)
    shown = conversations[:limit] if row is None else [conversations[row - 1]]
    show_conversations(console, tokenizer, shown, show_tokens, arguments)
    summary = summarise(tokenizer, conversations, left_out, arguments)
    print_table(summary_table(summary, data), left_out.sentences())
