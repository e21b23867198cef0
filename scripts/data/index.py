"""`drafthead build-datastore`: an index of what a target has written, for lookup while decoding."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import fresh_folder
from drafthead.heads.target.loading import vocabulary_of
from drafthead.heads.trees.static import TREE_SIZES
from drafthead.infer.drafters.datastore import DEPTH, Datastore
from drafthead.infer.drafters.ngram_table import ORDERS, NgramTable
from drafthead.infer.drafters.past import Lookup
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import OWN_OUTLOOK, StoreLookup
from drafthead.infer.drafters.stored import Record
from drafthead.lab.theory.replayed_lookup import reached
from drafthead.scripts import options
from drafthead.scripts.data.inspect_data import load_tokenizer
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.token_table import TokenSequence, token_table

WHOLE = 1 << 20  # tokens of a conversation: nothing is cut
HELD_OUT = 0.02  # share of the conversations that is left out, to measure on
MEASURED = 64  # of them, at most

# What steps are told apart by, where it is not the number of tokens that were found.
OUTLOOKS = {
    NO_OUTLOOK: "all",
    0: "none",
    **{outlook: f"text {length}" for length, outlook in OWN_OUTLOOK.items()},
}


def an_order(value: int | None) -> int | None:
    """The length of n-grams, if one is wanted; raises UserError for one that is not counted."""
    if value is not None and value not in ORDERS:
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
        int | None,
        typer.Option(
            help="Count what followed every n-gram of up to so many tokens, the next one included "
            "(2 to 5), instead of indexing the texts: smaller, and drawn drafts are possible.",
            callback=an_order,
        ),
    ] = None,
    prompt_column: options.PromptColumn = None,
    template_argument: options.TemplateArgument = None,
    strict: options.Strict = False,
) -> None:
    """Index a target's earlier answers, so that decoding can look up what followed the same words.

    No model is trained: --datastore FOLDER of generate, chat, compare and others proposes what came
    next before, for next to no time. Good where a target answers many requests of a kind, and the
    more of its own answers there are, the better. The answers to one prompt of 50 are left out, and
    show how many tokens a pass the others would have brought for them. With --ngrams the texts are
    forgotten, and a table says how often each token followed the last ones.
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
        vocabulary = vocabulary_of(loaded)
        stored = (
            NgramTable.of(left, vocabulary, ngrams) if ngrams else Datastore.of(left, vocabulary)
        )
        found = measured(StoreLookup(stored), held_out)
        stored.record = replace(stored.record, reached=found)
        stored.save(folder)
    show(stored.record, len(left), held_out, output)


def measured(lookup: Lookup, held_out: list[list[int]]) -> dict[int, dict[int, list[float]]]:
    """How well lookup guesses texts that it does not know, if any: see `Record.reached`."""
    found: dict[int, dict[int, list[float]]] = {}
    for nodes in tqdm(TREE_SIZES if held_out else (), desc="measuring", unit="size", delay=1):
        for outlook, shares in reached(lookup, held_out, nodes).items():
            found.setdefault(outlook, {})[nodes] = shares
    return found


def answers(sequence: TokenSequence) -> Iterator[list[int]]:
    """The runs of tokens that the target wrote.

    Tokens 5 6 7 8 9, of which 6 7 and 9 are supervised, hold the answers 6 7 and 9.
    """
    learnt = sequence.supervised.numpy().astype(np.int8)
    borders = np.flatnonzero(np.diff(learnt, prepend=0, append=0)).tolist()
    for start, end in list(pairwise(borders))[::2]:
        yield sequence.input_ids[start:end].tolist()


def show(record: Record, texts: int, held_out: list[list[int]], output: Path) -> None:
    """Print what a datastore holds and how well it guesses."""
    console = Console(highlight=False, soft_wrap=True)
    counted = f", n-grams of up to {record.ngrams}" if record.ngrams else ""
    console.print(f"{output}: {record.tokens:,} tokens of {texts:,} answers{counted}")
    if not held_out:
        console.print("too few prompts to leave one out: how well it guesses was not measured")
        return
    console.print(
        f"tokens a pass (tau), on {len(held_out)} answers that are not in it: by prompt lookup in "
        "these alone; with it in all steps, and where none or so many of the last tokens were "
        "found, in the datastore or before in the text"
    )
    alone = measured(PromptLookup(DEPTH), held_out)[NO_OUTLOOK]
    found = record.reached
    outlooks = sorted(found, key=lambda outlook: (outlook in OWN_OUTLOOK.values(), outlook))
    table = Table()
    for name in ("nodes", "alone", *(OUTLOOKS.get(o, str(o)) for o in outlooks)):
        table.add_column(name, justify="right")
    for nodes in found[NO_OUTLOOK]:
        shares = (alone[nodes], *(found[outlook].get(nodes) for outlook in outlooks))
        table.add_row(str(nodes), *(f"{1 + sum(some):.2f}" if some else "-" for some in shares))
    console.print(table)
