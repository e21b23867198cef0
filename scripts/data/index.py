"""`drafthead data index`: counts of what a target has written, for lookup while decoding."""

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.storage.files import fresh_folder, write_text
from drafthead.scripts import options

WHOLE = 1 << 20  # tokens of a conversation: nothing is cut
HELD_OUT = 0.02  # share of the conversations that is left out, to measure on
MEASURED = 64  # of them, at most


def main(
    *,
    data: options.OwnAnswers,
    target: options.Named,
    output: options.NewFolder,
    ngrams: Annotated[
        int,
        Field(
            ge=2,
            le=5,
            description="Length of the longest n-grams, 2 to 5. Shorter ones make smaller tables.",
        ),
    ] = 5,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Also write the answers to this file, for SGLang's external corpus."),
    ] = None,
    rows: options.Rows,
) -> None:
    """Count n-grams in a model's answers, to draft from them.

    Nothing is trained. --draft ngrams:FOLDER then proposes what followed the same words before, at
    almost no cost. This works well if the model answers many similar requests, and better with more
    answers. One prompt of 50 is held out to report the tokens per pass that the table reaches.
    """

    from drafthead.core.target.any_target import tokenizer_named
    from drafthead.core.target.loading import vocabulary_of
    from drafthead.infer.drafters.ngram_table import NgramTable
    from drafthead.lab.reports.index import answers, show
    from drafthead.train.data.token_table import token_table

    if corpus is not None and corpus.exists():
        raise UserError(f"{corpus} is there already: choose another --corpus")
    with fresh_folder(output) as folder:
        tokenizer = tokenizer_named(target)
        table = token_table(rows.reading(data, WHOLE, None), tokenizer)
        left, held_out = (
            [answer for sequence in part for answer in answers(sequence)]
            for part in table.parted(HELD_OUT, MEASURED)
        )
        if not left:
            raise UserError(f"{data} holds no answers to index: add some")
        counted = NgramTable.of(left, vocabulary_of(tokenizer), ngrams)
        counted.save(folder)
    if corpus is not None:
        # SGLang encodes each line's string again, without tokens that it would add.
        texts = (tokenizer.decode(answer, clean_up_tokenization_spaces=False) for answer in left)
        write_text(corpus, "".join(json.dumps(text) + "\n" for text in texts))
    show(counted, len(left), held_out, output)
