"""`drafthead build-datastore`: counts of what a target has written, for lookup while decoding."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import fresh_folder
from drafthead.heads.target.loading import vocabulary_of
from drafthead.heads.trees.static import TREE_SIZES
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.ngram_table import ORDERS, NgramTable
from drafthead.infer.drafters.store_lookup import DEPTH, StoreLookup
from drafthead.lab.theory.replayed_lookup import tokens_a_pass
from drafthead.scripts import options
from drafthead.scripts.data.inspect_data import load_tokenizer
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.token_table import TokenSequence, token_table

WHOLE = 1 << 20  # tokens of a conversation: nothing is cut
HELD_OUT = 0.02  # share of the conversations that is left out, to measure on
MEASURED = 64  # of them, at most


def an_order(value: int) -> int:
    """The length of n-grams; raises UserError for one that is not counted."""
    if value not in ORDERS:
        raise UserError(f"--ngrams must be {ORDERS[0]} to {ORDERS[-1]}, got {value}")
    return value


def main(
    data: Annotated[
        str,
        typer.Option(help="What the target has written: answers of `drafthead distill`, or logs."),
    ],
    tokenizer: Annotated[
        str, typer.Option("--target", help="The target, whose tokens they become.")
    ],
    output: options.NewFolder,
    ngrams: Annotated[
        int,
        typer.Option(
            help="Tokens of the longest n-grams that are counted, the next one included (2 to 5). "
            "Shorter ones make smaller tables.",
            callback=an_order,
        ),
    ] = ORDERS[-1],
    prompt_column: options.PromptColumn = None,
    template_argument: options.TemplateArgument = None,
    strict: options.Strict = False,
) -> None:
    """Count what a target has written, so that decoding can look up what followed the same words.

    No model is trained: --datastore FOLDER of generate, chat, compare and others proposes what came
    next before, for next to no time. Good where a target answers many requests of a kind, and the
    more of its own answers there are, the better. The answers to one prompt of 50 are left out, and
    show how many tokens a pass the others would have brought for them.
    """
    arguments = options.template_values(template_argument)
    reading = Reading(data, prompt_column, WHOLE, None, template_arguments=arguments, strict=strict)
    with fresh_folder(output) as folder:
        loaded = load_tokenizer(tokenizer)
        table = token_table(reading, loaded)
        left, held_out = (
            [answer for sequence in part for answer in answers(sequence)]
            for part in table.parted(HELD_OUT, MEASURED)
        )
        if not left:
            raise UserError(f"{data} holds no answers to index: add some")
        counted = NgramTable.of(left, vocabulary_of(loaded), ngrams)
        counted.save(folder)
    show(counted, len(left), held_out, output)


def answers(sequence: TokenSequence) -> Iterator[list[int]]:
    """The runs of tokens that the target wrote.

    Tokens 5 6 7 8 9, of which 6 7 and 9 are supervised, hold the answers 6 7 and 9.
    """
    learnt = sequence.supervised.numpy().astype(np.int8)
    borders = np.flatnonzero(np.diff(learnt, prepend=0, append=0)).tolist()
    for start, end in list(pairwise(borders))[::2]:
        yield sequence.input_ids[start:end].tolist()


def show(counted: NgramTable, texts: int, held_out: list[list[int]], output: Path) -> None:
    """Print what a table holds, and how well it guesses texts that it does not know, if any."""
    console, record = Console(highlight=False, soft_wrap=True), counted.record
    console.print(
        f"{output}: {record.tokens:,} tokens of {texts:,} answers, n-grams of up to {record.ngrams}"
    )
    if not held_out:
        console.print("too few prompts to leave one out: how well it guesses was not measured")
        return
    console.print(
        f"tokens a pass (tau), on {len(held_out)} answers that are not in it: by prompt lookup in "
        "these alone, and with the table"
    )
    table = Table()
    for name in ("nodes", "alone", "with the table"):
        table.add_column(name, justify="right")
    lookups = PromptLookup(DEPTH), StoreLookup(counted)
    for nodes in tqdm(TREE_SIZES, desc="measuring", unit="size", delay=1, leave=False):
        found = (tokens_a_pass(lookup, held_out, nodes) for lookup in lookups)
        table.add_row(str(nodes), *(f"{tau:.2f}" for tau in found))
    console.print(table)
