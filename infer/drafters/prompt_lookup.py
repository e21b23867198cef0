"""Prompt lookup: propose what followed the last few tokens at their previous occurrence.

It needs no model and pays where answers repeat their prompt, as in editing and summarising
(Saxena, 2023; transformers calls it `prompt_lookup_num_tokens`).
"""

import torch

from drafthead.heads.coupling import Choice
from drafthead.heads.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.heads.errors import UserError
from drafthead.heads.host import to_host
from drafthead.heads.sampling import SamplingConfig
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

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> "PromptLookupSession":
        """A session with the first tokens of prompts [B, T]; the others come with commits."""
        return PromptLookupSession(self, to_host(prompts[:, 0]))


class Past:
    """The tokens of one row, and where the token after each n-gram's last occurrence is."""

    def __init__(self, first: int):
        self.tokens = [first]
        self.followed_at: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        """Add a token: it follows every n-gram that ends just before it."""
        place = len(self.tokens)
        for size in range(1, min(MAX_NGRAM, place) + 1):
            self.followed_at[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)

    def __copy__(self) -> "Past":
        """A past that goes on by itself."""
        twin = Past(self.tokens[0])
        twin.tokens, twin.followed_at = self.tokens.copy(), self.followed_at.copy()
        return twin

    def first_tokens(self, count: int) -> "Past":
        """The past as it was when it had `count` tokens."""
        if count >= len(self.tokens):
            return self
        earlier = Past(self.tokens[0])
        for token in self.tokens[1:count]:
            earlier.append(token)
        return earlier

    def continuation(self, count: int, least: int = 1) -> list[int]:
        """`count` tokens, or none, that followed the longest n-gram that the row ends with.

        N-grams of fewer than `least` tokens do not count. In ``a b c d a b`` the last bigram
        ``a b`` was followed by ``c d a b`` before. What follows those is not there yet: it is taken
        to be what followed them before, so the text goes on in a circle, ``c d a b c d``.
        """
        for size in range(min(MAX_NGRAM, len(self.tokens)), least - 1, -1):
            place = self.followed_at.get(tuple(self.tokens[-size:]))
            if place is not None:
                found = self.tokens[place : place + count]
                return [found[i % len(found)] for i in range(count)]
        return []


class PromptLookupSession(DraftSession):
    """Prompt lookup at work: an index of n-grams for each row, kept up to date token by token."""

    row_state = ("pasts",)

    def __init__(self, drafter: PromptLookup, first_tokens: list[int]):
        self.drafter = drafter
        self.pasts = [Past(token) for token in first_tokens]
        self.device = torch.device("cpu")

    def commit(self, committed: Committed) -> None:
        """Add the committed tokens to each row's past."""
        self.device = committed.tokens.device
        for past, tokens in zip(self.pasts, committed.new_tokens, strict=True):
            for token in tokens:
                past.append(token)

    def cut(self, length: int) -> None:
        """Keep the tokens at the first `length` positions and the one that follows them."""
        self.pasts = [past.first_tokens(length + 1) for past in self.pasts]

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """A chain as long as the longest continuation; the root alone if no row has one."""
        guesses = [past.continuation(budget.depth) for past in self.pasts]
        depth = max(map(len, guesses))
        rows = []
        for past, guess in zip(self.pasts, guesses, strict=True):
            rows.append([past.tokens[-1], *guess, *[PADDING] * (depth - len(guess))])
        tokens = torch.tensor(rows, device=self.device)
        # Copied tokens are not drawn, so the tree has no draft distribution.
        return TokenTree.from_shape(self.drafter.shapes[depth], tokens)
