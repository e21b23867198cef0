"""How well lookup guesses texts, without any model: their decoding is played again."""

from collections.abc import Sequence
from statistics import fmean

from drafthead.heads.trees.guesses import GuessTree
from drafthead.infer.drafters.lookup import History, Lookup
from drafthead.infer.drafters.store_lookup import DEPTH


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
