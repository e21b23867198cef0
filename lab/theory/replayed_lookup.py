"""How well lookup guesses texts, without any model: their decoding is played again."""

from collections.abc import Sequence
from typing import NamedTuple

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.infer.drafters.datastore import DEPTH
from drafthead.infer.drafters.guess_tree import GuessTree
from drafthead.infer.drafters.past import Lookup, Past


def accepted(tree: GuessTree, text: Sequence[int]) -> int:
    """How many tokens of a text a tree holds, from its root on."""
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


class Replayed(NamedTuple):
    """One step of decoding that is played again."""

    outlook: int
    accepted: int  # tokens


def replayed(lookup: Lookup, text: Sequence[int], nodes: int) -> list[Replayed]:
    """The steps that decode a text with trees of `nodes` nodes, the root included."""
    past, place, steps = Past(text[0]), 1, []
    while place < len(text):
        tree = lookup.guess(past, nodes - 1, DEPTH)
        length = accepted(tree, text[place:])
        steps.append(Replayed(lookup.outlook(past), length))
        for token in text[place : place + length + 1]:  # the last one is the bonus token
            past.append(token)
        place += length + 1
    return steps


def reached(lookup: Lookup, texts: Sequence[Sequence[int]], nodes: int) -> dict[int, list[float]]:
    """How often trees of `nodes` nodes were accepted to depth 1, 2, ... up to `DEPTH`.

    At each outlook, and with NO_OUTLOOK in all steps.
    """
    lengths: dict[int, list[int]] = {NO_OUTLOOK: []}
    for text in texts:
        for step in replayed(lookup, text, nodes):
            lengths.setdefault(step.outlook, []).append(step.accepted)
            lengths[NO_OUTLOOK].append(step.accepted)
    return {outlook: shares(found) for outlook, found in lengths.items()}


def shares(lengths: Sequence[int]) -> list[float]:
    """The part of the lengths that is at least 1, 2, ... up to `DEPTH`."""
    count = max(1, len(lengths))
    return [sum(length >= depth for length in lengths) / count for depth in range(1, DEPTH + 1)]
