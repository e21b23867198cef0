"""What a table of n-grams holds, and how well it guesses answers that it does not know."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from drafthead.heads.trees.static import TREE_SIZES
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import DEPTH, StoreLookup
from drafthead.lab.theory.replayed_lookup import tokens_a_pass
from drafthead.train.data.token_table import TokenSequence


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
