"""Prompt lookup: propose what followed the last few tokens at their previous occurrence.

It needs no model and pays where answers repeat their prompt, as in editing and summarising
(Saxena, 2023; transformers calls it `prompt_lookup_num_tokens`).
"""

from functools import cache

import torch

from drafthead.heads.coupling import Choice
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.trees.static import chain_budgets
from drafthead.heads.trees.tree import PADDING, Budget, TokenTree, TreeShape
from drafthead.infer.drafters.past import Lookup, Past, Pasts

# Acceptance of each depth, given the depth before, that is assumed where so many tokens were found
# again.
FOUND_ALPHA = {1: 0.4, 2: 0.65, 3: 0.85}

chain = cache(TreeShape.chain)  # a shape keeps its tables


class PromptLookupSession(Pasts["PromptLookup"]):
    """Prompt lookup at work."""

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """A chain as long as the longest continuation; the root alone if no row has one."""
        guesses = [past.continuation(budget.depth, self.drafter.least) for past in self.pasts]
        depth = max(map(len, guesses))
        rows = []
        for past, guess in zip(self.pasts, guesses, strict=True):
            rows.append([past.tokens[-1], *guess, *[PADDING] * (depth - len(guess))])
        tokens = torch.tensor(rows, device=self.device)
        # Copied tokens are not drawn, so the tree has no draft distribution.
        return TokenTree.from_shape(chain(depth), tokens)


class PromptLookup(Lookup):
    """A chain of up to `depth` tokens copied from the row's own past."""

    session = PromptLookupSession

    def __init__(self, depth: int, least: int = 1):
        """N-grams of fewer than `least` tokens do not count. Raises UserError for a depth of 0."""
        if depth < 1:
            raise UserError(f"prompt lookup must draft at least 1 token, got {depth}")
        self.least = least
        self.budgets = chain_budgets(depth)

    def outlook(self, past: Past) -> int:
        """How many of the row's last tokens have occurred before, in a row."""
        return past.matched(self.least)

    def chances_found(self, outlook: int, budget: Budget) -> tuple[float, ...]:
        """Depends on the text; this is what it is before anything is known of it."""
        return tuple(FOUND_ALPHA[outlook] ** depth for depth in range(1, budget.depth + 1))
