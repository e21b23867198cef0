"""A report on a table of n-grams, and how well it guesses answers that it does not know.

Their decoding is played again, without any model.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from tqdm import tqdm

from drafthead.core.trees.guesses import GuessTree
from drafthead.heads.growing.static import TREE_SIZES
from drafthead.infer.drafters.history import History
from drafthead.infer.drafters.lookup import Lookup, PromptLookup
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import DEPTH, StoreLookup
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.sequences import TokenSequence


def answers(sequence: TokenSequence) -> Iterator[list[int]]:
    """The runs of tokens that the target wrote.

    Tokens 5 6 7 8 9, of which 6 7 and 9 are supervised, hold the answers 6 7 and 9.
    """
    learnt = sequence.supervised.numpy().astype(np.int8)
    borders = np.flatnonzero(np.diff(learnt, prepend=0, append=0)).tolist()
    for start, end in list(pairwise(borders))[::2]:
        yield sequence.input_ids[start:end].tolist()


def accepted(tree: GuessTree, text: Sequence[int]) -> int:
    """Return how many tokens of a text a tree holds, from its root on."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True), start=1)
    }
    place, length = 0, 0
    for token in text:
        if (place, token) not in children:
            break
        place, length = children[place, token], length + 1
    return length


def replayed(lookup: Lookup, text: Sequence[int], nodes: int) -> list[int]:
    """The tokens accepted in each step that decodes a text with trees of `nodes` nodes."""
    past, place, steps = History(text[0]), 1, []
    while place < len(text):
        tree = lookup.guess(past, nodes - 1, DEPTH)
        length = accepted(tree, text[place:])
        steps.append(length)
        for token in text[place : place + length + 1]:  # the last one is the bonus token
            past.append(token)
        place += length + 1
    return steps


def tokens_a_pass(lookup: Lookup, texts: Sequence[Sequence[int]], nodes: int) -> float:
    """Tokens that a step with a tree of `nodes` nodes brings on average, the bonus included."""
    lengths = [length for text in texts for length in replayed(lookup, text, nodes)]
    return 1 + fmean(lengths) if lengths else 1.0


def show(counted: NgramTable, texts: int, held_out: list[list[int]], output: Path) -> None:
    """Print what a table holds, and how well it guesses texts that it does not know, if any."""
    record = counted.record
    print(f"{output}: {record.tokens:,} tokens of {texts:,} answers, n-grams of up to "
          f"{record.ngrams}")  # fmt: skip
    if not held_out:
        print("too few prompts to leave one out: how well it guesses was not measured")
        return
    lookups = PromptLookup(DEPTH), StoreLookup(counted)
    rows = [
        [str(nodes), *(number(tokens_a_pass(lookup, held_out, nodes)) for lookup in lookups)]
        for nodes in tqdm(TREE_SIZES, desc="measuring", unit="size", delay=1, leave=False)
    ]
    note = (
        f"tokens per pass (tau), on {len(held_out)} answers not in the table: by prompt lookup in "
        "these alone, and with the table"
    )
    print_table(Table("", ["nodes", "alone", "with the table"], rows), [note])
