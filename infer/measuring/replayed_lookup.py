"""How well lookup guesses texts, without any model: their decoding is played again."""

from collections.abc import Sequence

from drafthead.infer.drafters.datastore import DEPTH
from drafthead.infer.drafters.guess_tree import GuessTree
from drafthead.infer.drafters.past import Past
from drafthead.infer.drafters.store_lookup import StoreLookup


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


def replayed(lookup: StoreLookup, text: Sequence[int], nodes: int) -> list[int]:
    """Accepted tokens of each step that decodes a text with trees of `nodes` nodes and the root."""
    past, place, lengths = Past(text[0]), 1, []
    while place < len(text):
        tree = lookup.guess(past, nodes - 1, DEPTH)
        length = accepted(tree, text[place:])
        lengths.append(length)
        for token in text[place : place + length + 1]:  # the last one is the bonus token
            past.append(token)
        place += length + 1
    return lengths


def reached(
    lookup: StoreLookup, texts: Sequence[Sequence[int]], sizes: Sequence[int]
) -> dict[int, list[float]]:
    """For trees of each size: how often they were accepted to depth 1, 2, ... up to `DEPTH`."""
    found = {}
    for nodes in sizes:
        lengths = [length for text in texts for length in replayed(lookup, text, nodes)]
        steps = max(1, len(lengths))
        found[nodes] = [
            sum(length >= depth for length in lengths) / steps for depth in range(1, DEPTH + 1)
        ]
    return found
