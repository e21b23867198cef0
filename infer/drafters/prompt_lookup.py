"""Prompt lookup: propose what followed the last few tokens when they last occurred.

Costs no model at all and wins where answers repeat their prompt, as in editing and summarising
(Saxena, 2023; transformers calls it `prompt_lookup_num_tokens`).
"""

import torch

from drafthead.heads.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.trees.static import chain_budgets
from drafthead.heads.trees.tree import PADDING, Budget, TokenTree, TreeShape

MAX_NGRAM = 3


class PromptLookup(Drafter):
    """A chain of up to `depth` tokens copied from the row's own past."""

    features = FeatureSpec(layers=(), last=False)

    def __init__(self, depth: int):
        """Raises UserError when depth is below 1."""
        if depth < 1:
            raise UserError(f"prompt lookup must draft at least 1 token, got {depth}")
        self.shapes = [TreeShape.chain(d) for d in range(depth + 1)]
        self.budgets = chain_budgets(depth)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session that knows the first token of each prompt; the others come with commits."""
        return PromptLookupSession(self, prompts[:, 0].tolist())


class Past:
    """The tokens of one row and where each n-gram was last followed by something."""

    def __init__(self, first: int):
        self.tokens = [first]
        self.followed_at: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        """Add a token: every n-gram that ends before it is now followed at its place."""
        place = len(self.tokens)
        for size in range(1, min(MAX_NGRAM, place) + 1):
            self.followed_at[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known n-gram that the row ends with.

        After ``a b c d a b`` the bigram ``a b`` was followed by ``c d a``.
        """
        for size in range(min(MAX_NGRAM, len(self.tokens)), 0, -1):
            place = self.followed_at.get(tuple(self.tokens[-size:]))
            if place is not None:
                return self.tokens[place : place + count]
        return []


class PromptLookupSession(DraftSession):
    """Prompt lookup at work: an index of n-grams for each row, kept up to date token by token."""

    def __init__(self, drafter: PromptLookup, first_tokens: list[int]):
        self.drafter = drafter
        self.pasts = [Past(token) for token in first_tokens]
        self.device = torch.device("cpu")

    def commit(self, committed: Committed) -> None:
        """Add the committed tokens to each row's past."""
        self.device = committed.tokens.device
        both = zip(committed.tokens.tolist(), committed.lengths.tolist(), strict=True)
        for past, (tokens, length) in zip(self.pasts, both, strict=True):
            for token in tokens[:length]:
                past.append(token)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the pasts of all other rows."""
        self.pasts = [self.pasts[row] for row in rows.tolist()]

    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """A chain as long as the longest continuation found; the root alone when there is none.

        Copied tokens are certain and not drawn, so the tree carries no draft distribution.
        """
        found = [past.continuation(budget.depth) for past in self.pasts]
        depth = max(map(len, found))
        rows = []
        for past, guess in zip(self.pasts, found, strict=True):
            rows.append([past.tokens[-1], *guess, *[PADDING] * (depth - len(guess))])
        tokens = torch.tensor(rows, device=self.device)
        return TokenTree.from_shape(self.drafter.shapes[depth], tokens)
