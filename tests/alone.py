"""Draft sessions outside the engine, which for some of them has to read the text."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafthead.core.coupling import Choice
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.host import to_host
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.infer.engine.prefill import padded, prefill


class Alone(DraftSession):
    """A session to which a target's cache of all committed tokens is lent."""

    row_state = ("session", "texts")

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        prompts: torch.Tensor,  # [B, T]
        lengths: torch.Tensor,  # [B]
    ):
        self.session, self.target = drafter.start(prompts, lengths), target
        # The first commit begins with the second token of a prompt.
        self.texts: list[list[int]] = [row[:1] for row in to_host(prompts)]

    def commit(self, committed: Committed) -> None:
        pairs = zip(self.texts, committed.new_tokens, strict=True)
        self.texts = [[*text, *new] for text, new in pairs]
        cache = cache_of(self.target, [text[:-1] for text in self.texts])
        self.session.commit(replace(committed, cache=cache))

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        return self.session.propose(budget, sampling, random)


def cache_of(target: Target, texts: Sequence[Sequence[int]]) -> TreeCache:
    """A cache in which texts are committed."""
    cache = target.new_cache()
    prefill(target, *padded(texts, target.device), NO_FEATURES, cache, room=32)
    return cache
