"""Prompt lookup, alone or beside a head, on a device where steps are recorded: none waits for text.

What `History` and `GrowingTree` do on the host, the tables here do for a batch: in functions of
tensors that are recorded themselves. The host's histories follow as soon as tokens arrive there.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch.nn.functional import pad

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.dims import Spec
from drafthead.core.drafting.drafter import Committed, OnDevice
from drafthead.core.host import to_device
from drafthead.core.kv_cache.cache_memory import power_of_two
from drafthead.core.sampling import Sampling
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import PADDING, Budget, TokenTree, ancestor_mask
from drafthead.infer.drafters.history import LONGEST, MAX_NGRAM, History, MatchRecord

ROOM = 512  # columns at least for tokens to come; a text that has used them up is brought again
# Comparisons of a column with a new token, which take 12 bytes each: more of them (16 rows of
# 17,000 tokens with 64 nodes, say) are left to the host.
MOST_COMPARED = 2**24


class Text(NamedTuple):
    """The texts of a batch and what their ends match, see `History`."""

    tokens: torch.Tensor  # [B, W], of which the last column belongs to no text
    lengths: torch.Tensor  # [B]
    places: torch.Tensor  # [B] of the token after the match; 0 without one
    matched: torch.Tensor  # [B] tokens of the match


TEXT: tuple[Spec, ...] = ("B W", "B", "B", "B")
ADVANCED: dict[str, Spec] = {"text": TEXT, "tokens": "B T", "counts": "B"}
WITH_CHAIN: dict[str, Spec] = {
    "text": TEXT,
    "logs": ".",
    "tokens": "B N",
    "parents": "B N",
    "ancestors": "B N N",
    "scores": "B N",
}


def width_of(histories: Sequence[History]) -> int:
    """The columns of the texts of rows."""
    return power_of_two(max(len(past.tokens) for past in histories) + ROOM)


def text_of(histories: Sequence[History], device: torch.device) -> Text:
    """The texts of rows, on a device."""
    width = width_of(histories)
    rows = [past.tokens + [0] * (width - len(past.tokens)) for past in histories]
    ends = [(len(past.tokens), *(past.match or (0, 0))) for past in histories]
    return Text(to_device(rows, device), *to_device(ends, device).unbind(1))


def advanced(
    text: Text,
    tokens: torch.Tensor,  # [B, T]
    counts: torch.Tensor,  # [B] how many of them each text gains, at least 1
) -> Text:
    """The texts after more tokens, as `History.append` leaves them after one token each.

    A match goes on while the next token continues it and no occurrence found by n-grams is as long.
    So of each match, the one at the beginning and those found after each token, it is computed
    until when it would go on; following these from match to match ends at the last one.
    """
    width, steps = text.tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
    is_new = steps < counts[:, None]  # [B, T]
    ends = (text.lengths[:, None] + steps + 1).clamp_max(width - 1)  # of padding maybe beyond
    table = text.tokens.scatter(1, torch.where(is_new, ends - 1, width - 1), tokens)
    found, lengths = last_occurrences(table, ends)
    places = torch.cat([text.places[:, None], found], 1)  # [B, 1 + T] of match j, after j tokens
    matched = torch.cat([text.matched[:, None], lengths], 1)
    slots = torch.arange(1 + tokens.shape[1], device=tokens.device)
    age = steps - slots[:, None]  # [1 + T, T] tokens between a match and each token
    at = (places[..., None] + age).clamp(0, width - 1)  # [B, 1 + T, T]
    is_said = table.gather(1, at.flatten(1)).view(at.shape) == tokens[:, None]
    is_longer = (matched[..., None] + age + 1).clamp_max(LONGEST) > lengths[:, None]
    goes_on = (is_said & is_longer & (matched[..., None] > 0)) | (age < 0)
    # The token that ends each match, [B, 1 + T].
    end = (goes_on.long().cumprod(-1) * is_new[:, None]).sum(-1)
    following = torch.where(end < counts[:, None], end + 1, slots)
    for _ in range(tokens.shape[1].bit_length()):  # each time twice as many matches on
        following = following.gather(1, following)
    last = following[:, :1]
    since = counts - last[:, 0]
    length, place = matched.gather(1, last)[:, 0], places.gather(1, last)[:, 0]
    is_match = length > 0
    return Text(
        table,
        text.lengths + counts,
        torch.where(is_match, place + since, 0),
        torch.where(is_match, (length + since).clamp_max(LONGEST), 0),
    )


def last_occurrences(
    table: torch.Tensor,  # [B, W]
    ends: torch.Tensor,  # [B, T] lengths of texts
) -> tuple[torch.Tensor, torch.Tensor]:
    """After the last occurrence of the longest n-gram of the index that each text ends with, the
    place [B, T] and the length of the match; 0 where there is none.
    """
    width = table.shape[1]
    places = torch.arange(width, dtype=torch.int32, device=table.device)
    runs = places < ends[..., None]  # [B, T, W] whether n-grams that end before places are the same
    size = torch.zeros_like(runs, dtype=torch.int32)
    for back in range(1, MAX_NGRAM + 1):
        before = pad(table[:, :-back], (back, 0), value=PADDING)
        last = table.gather(1, (ends - back).clamp_min(0))
        runs = runs & (before[:, None] == last[..., None])
        size = size + runs
    # The longest n-gram first, and of its occurrences the last.
    found = (torch.where(size > 0, size * width + places, 0).amax(-1) % width).long()
    backs = torch.arange(1, LONGEST + 1, device=table.device)
    here, there = found[..., None] - backs, (ends[..., None] - backs).clamp_min(0)
    pairs = [table.gather(1, at.flatten(1)).view(at.shape) for at in (here.clamp_min(0), there)]
    return found, ((pairs[0] == pairs[1]) & (here >= 0)).long().cumprod(-1).sum(-1)


def with_chain(
    text: Text,
    logs: torch.Tensor,  # [LONGEST] float64, see `MatchRecord`
    tokens: torch.Tensor,  # [B, N] of a drafter's tree
    parents: torch.Tensor,  # [B, N], -1 for the root
    ancestors: torch.Tensor,  # [B, N, N] bool
    scores: torch.Tensor,  # [B, N]
    nodes: int,
    least: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best `nodes` nodes of a drafter's tree and of what followed matches of at least `least`
    tokens: tokens, parents, depths [B, nodes] and ancestors [B, nodes, nodes].

    As `with_lookup.merged` has them.
    """
    chain, gains = continuations(text, logs, nodes - 1, least)
    depths, size = ancestors.sum(-1) - 1, chain.shape[1]
    at = (depths - 1).clamp(0, size - 1)
    is_said = (tokens == chain.gather(1, at)) & (depths <= size) & gains[:, :1].isfinite()
    is_said = is_said | (depths == 0)
    agrees = (is_said[:, None] | ~ancestors).all(-1)  # [B, N] nodes of the tree that the chain has
    agreed, last = torch.where(agrees, depths, -1).max(-1, keepdim=True)
    # No node scores above its parent; one that both have has the better of its scores.
    inner = ancestors & (depths > 0)[:, None]
    own = torch.where(inner, scores.double()[:, None], torch.inf).amin(-1)
    own = torch.where(agrees, torch.maximum(own, gains.gather(1, at)), own)
    own = torch.where(tokens == PADDING, -torch.inf, own)
    steps = torch.arange(size, device=tokens.device)
    gains = torch.where(steps < agreed, -torch.inf, gains)
    # Candidates: the root, the tree's other nodes, those of the chain, and one for what is missing.
    count = tokens.shape[1] + size
    ranked = torch.cat([own[:, 1:], gains], 1).sort(dim=-1, descending=True, stable=True)
    best = torch.where(ranked.values > -torch.inf, ranked.indices + 1, count)[:, : nodes - 1]
    chosen = pad(best.sort(-1).values, (1, 0))  # [B, nodes], parents before children
    above = torch.where(steps == agreed, last, tokens.shape[1] - 1 + steps)
    above = pad(torch.cat([parents, above], 1), (0, 1))
    numbers = torch.zeros_like(above).scatter(
        1, chosen, torch.arange(nodes, device=tokens.device).expand_as(chosen)
    )
    new_parents = numbers.gather(1, above.gather(1, chosen).clamp_min(0))
    new_parents[:, 0] = -1
    all_tokens = pad(torch.cat([tokens, chain], 1), (0, 1), value=PADDING)
    seen = ancestor_mask(new_parents)
    return all_tokens.gather(1, chosen), new_parents, seen.sum(-1) - 1, seen


def continuations(
    text: Text, logs: torch.Tensor, count: int, least: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `History.continuation` gives [B, count], and `MatchRecord.log_chances` of it, -inf
    without a match.
    """
    steps = torch.arange(count, device=logs.device)
    left = (text.lengths - text.places)[:, None]  # the text goes on in a circle
    chain = text.tokens.gather(1, text.places[:, None] + steps % left)
    places = (text.matched[:, None] - 1).clamp_min(0) + steps
    gains = logs[places.clamp_max(len(logs) - 1)].cumsum(-1)
    return chain, torch.where(text.matched[:, None] >= least, gains, -torch.inf)


class Functions(NamedTuple):
    """`advanced` and `with_chain`, recorded."""

    advanced: Callable[..., Text]
    with_chain: Callable[..., Any]

    @classmethod
    def of(cls, target: Target) -> "Functions | None":
        """The functions of drafts for a target; None where its steps are not recorded."""
        if not target.memory.is_recorded:
            return None
        compile = target.backend.compile
        return cls(compile(advanced, ADVANCED, ()), compile(with_chain, WITH_CHAIN, ()))


class LateSession(OnDevice):
    """A session with lookup where steps are recorded: no draft waits for the last one's tokens.

    The host's histories learn late which matches were right, and what they know is brought to the
    device when rows change, and for the first draft after a step without one.
    """

    functions: Functions

    def __init__(self, *given: Any):
        """As the session that it is; see `LookupSession` and `WithLookupSession`."""
        super().__init__(*given)
        self.text: Text | None = None  # of the histories, and what is `unread`
        self.logs: torch.Tensor | None = None  # [LONGEST] see `MatchRecord`
        self.unread: list[Committed] = []  # by the host's histories
        self.is_asked = False  # for the step that is committed next

    @property
    @abstractmethod
    def pasts(self) -> Sequence[History]:
        """The host's histories."""

    @abstractmethod
    def read(self, committed: Committed) -> None:
        """Let the host's histories read what was committed."""

    def follow(self, committed: Committed) -> None:
        """Add what was committed to the texts, on the device at once."""
        # Without features, whose memory is the next step's.
        self.unread.append(replace(committed, features=Features(None), known_ends=None, cache=None))
        if committed.late is None:
            self.logs = None  # brought again with what has been learnt
        while self.unread and (self.unread[0].late is None or self.unread[0].late.known):
            self.read(self.unread.pop(0))
        longest = max(len(past.tokens) for past in self.pasts)
        longest += sum(each.tokens.shape[1] for each in self.unread)  # or less
        fits = self.text is not None and longest < self.text.tokens.shape[1]
        text = self.text if fits and self.is_asked else None
        self.text = text and self.functions.advanced(text, committed.tokens, committed.lengths)
        self.is_asked = False

    def settle(self) -> None:
        """Let the histories read all that was committed; the device will have them again."""
        while self.unread:
            self.read(self.unread.pop(0))
        self.text = None

    def is_late(self, budget: Budget, sampling: Sampling, random: Choice) -> bool:
        """Whether a draft is made on the device; else the texts are settled for the host."""
        follows = sampling.greedy or isinstance(random, NextDraws)
        compared = len(self.pasts) * width_of(self.pasts) * budget.nodes
        by_row = self.wanted is not None
        if budget.depth == 0 or not follows or compared > MOST_COMPARED or by_row:
            self.settle()
            return False
        return True

    def joined(self, tree: TokenTree, nodes: int, matches: MatchRecord, least: int) -> TokenTree:
        """The best `nodes` nodes of a tree with scores and of what followed the texts' matches."""
        assert tree.scores is not None
        device = tree.tokens.device
        if self.text is None:
            self.settle()
            self.text = text_of(self.pasts, device)
        if self.logs is None:
            self.logs = to_device(matches.logs, device, torch.float64)
        self.is_asked = True
        form = tree.tokens, tree.parents, tree.ancestors, tree.scores.expand(tree.tokens.shape)
        given = self.text, self.logs, *form, nodes, least
        tokens, parents, depths, ancestors = self.functions.with_chain(*given)
        return TokenTree(tokens, parents, depths, ancestors, max_depth=nodes - 1, width=nodes - 1)

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.settle()
        super().keep_rows(rows)

    def join_rows(self, other: Self, order: Sequence[int]) -> None:
        self.settle()
        other.settle()
        super().join_rows(other, order)

    def cut(self, length: int) -> None:
        self.settle()
        super().cut(length)
