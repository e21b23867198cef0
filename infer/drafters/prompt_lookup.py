"""Prompt lookup: propose what followed the last few tokens at an earlier occurrence.

It needs no model and pays where answers repeat their prompt, as in editing and summarising
(Saxena, 2023; transformers calls it `prompt_lookup_num_tokens`).
"""

import math

from drafthead.heads.errors import UserError
from drafthead.heads.trees.static import chain_budgets
from drafthead.heads.trees.tree import Budget
from drafthead.infer.drafters.guess_tree import GuessTree
from drafthead.infer.drafters.match_record import MatchRecord
from drafthead.infer.drafters.past import Lookup, Past

# Lengths of matches from which proposals count as another kind.
KINDS = (1, 2, 4, 6, 8, 16)


class PromptLookup(Lookup):
    """A chain of up to `depth` tokens copied from the row's own past."""

    def __init__(self, depth: int, least: int = 1):
        """Matches of fewer than `least` tokens do not count. Raises UserError for a depth of 0."""
        if depth < 1:
            raise UserError(f"prompt lookup must draft at least 1 token, got {depth}")
        self.least = least
        self.budgets = chain_budgets(depth)
        self.matches = MatchRecord()

    def guess(self, past: Past, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The chain that followed the match, or nothing."""
        tokens = past.continuation(min(nodes, depth), self.least)
        scores = self.matches.log_chances(past.matched(self.least), len(tokens))
        return GuessTree.chain(tokens, scores)

    def outlook(self, past: Past) -> int:
        """The longer the match, the more: 3 for one of 4 or 5 tokens, see `KINDS`."""
        length = past.matched(self.least)
        return sum(kind <= length for kind in KINDS)

    def chances_found(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """What is believed of the shortest matches of that kind."""
        chances = self.matches.log_chances(KINDS[outlook - 1], budget.depth)
        return tuple(map(math.exp, chances))
