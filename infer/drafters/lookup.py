"""Lookup: propose what followed the last few tokens when they occurred before.

Prompt lookup needs no model and pays where answers repeat their prompt, as in editing and
summarising (Saxena, 2023; transformers calls it `prompt_lookup_num_tokens`). `store_lookup` also
looks into what the target has written before.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.host import to_host
from drafthead.core.sampling import RowRandom, Sampling, draft_distribution, sample
from drafthead.core.target.features import FeatureSpec
from drafthead.core.trees.guesses import Guesses, GuessTree, Proposal
from drafthead.core.trees.tree import Budget, Free, TokenTree, TreeShape
from drafthead.heads.growing.static import free_budgets
from drafthead.infer.drafters.history import History, MatchRecord
from drafthead.infer.drafters.in_form import in_form

# Probabilities of the next token after some tokens, at least one; their sum may be below 1.
Distribution: TypeAlias = Callable[[Sequence[int]], Mapping[int, float]]
Support: TypeAlias = tuple[list[int], list[float]]  # different tokens, and their probabilities


class Lookup(Drafter):
    """A drafter that reads nothing but its rows' histories."""

    features = FeatureSpec(layers=(), last=False)
    names: tuple[str, ...] = ("lookup",)
    matches: MatchRecord  # how often what followed a match was right
    # What rules that draw children draw them from; most lookup has copies alone, which are chosen.
    distribution: Distribution | None = None
    most_drawn: int  # tokens of a drawn chain

    @abstractmethod
    def guess(self, past: History, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        """The tree of up to `nodes` nodes, the root not counted, after a row's history.

        `follows` is whether the rule follows the target's own tokens.
        """

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> "LookupSession":
        """A session with the first tokens of prompts [B, T]; the others come with commits."""
        return LookupSession(self, to_host(prompts[:, 0]))

    def part(self, names: frozenset[str] | None) -> "Lookup":
        """The part of it that drafts under some of its names; None: all."""
        return self

    def learn(self, past: History) -> None:
        """A row has gained a token."""


class LookupSession(DraftSession):
    """A session that knows its rows' histories, each with an index of n-grams."""

    row_state: ClassVar[tuple[str, ...]] = ("histories",)
    knows_prompt = False  # tokens of a prompt are not the target's

    def __init__(self, drafter: Lookup, first_tokens: Sequence[int]):
        self.drafter = drafter
        self.histories = [History(token) for token in first_tokens]
        self.device = torch.device("cpu")
        # Nodes and rule of the last free draft, and that, for as long as nothing was committed.
        self.last: tuple[int, bool, Guesses] | None = None

    def commit(self, committed: Committed) -> None:
        self.device = committed.tokens.device
        for past, tokens in zip(self.histories, committed.new_tokens, strict=True):
            past.salt = past.salt or committed.salt
            for token in tokens:
                if self.knows_prompt and past.match is not None:
                    self.drafter.matches.add(past.match.length, past.guess == token)
                past.append(token)
                self.drafter.learn(past)
        self.knows_prompt, self.last = True, None

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> Proposal:
        """Each row's own tree; the root alone if there is nothing to guess.

        Under rules that draw children, a chain, if there is a distribution to draw it from.
        """
        distribution = self.drafter.distribution
        if isinstance(random, RowRandom) and distribution is not None:
            texts = [past.tokens for past in self.histories]
            most = min(budget.depth, self.drafter.most_drawn)
            return drawn_chain(texts, distribution, most, sampling, random)
        follows = sampling.greedy or isinstance(random, NextDraws)
        found = self.guesses(budget, follows)
        return found if isinstance(budget, Free) else found.tree()

    def ask(self, drafter: Lookup) -> None:
        """Draft by another lookup of the same tokens from now on."""
        if drafter is not self.drafter:
            self.drafter, self.last = drafter, None

    def guesses(self, budget: Budget, follows: bool) -> Guesses:
        """Each row's tree within a budget; `follows` as for `Lookup.guess`."""
        if isinstance(budget, Free) and self.last is not None:
            nodes, like_now, found = self.last
            if nodes >= budget.nodes and like_now == follows:
                return found.best(budget.nodes)
        limits = budget.nodes - 1, budget.depth
        parts = [self.drafter.part(names) for names in self.wanted or [None] * len(self.histories)]
        forms = self.forms or [None] * len(self.histories)
        trees = [
            part.guess(past, *limits, follows)
            if form is None
            else in_form(form, past, limits[0], partial(guess_of, part, limits[1], follows))
            for past, part, form in zip(self.histories, parts, forms, strict=True)
        ]
        found = Guesses([past.tokens[-1] for past in self.histories], trees, self.device)
        if isinstance(budget, Free):
            self.last = budget.nodes, follows, found
        return found

    def cut(self, length: int) -> None:
        self.knows_prompt, self.last = False, None
        self.histories = [past.first_tokens(length + 1) for past in self.histories]


def guess_of(lookup: Lookup, depth: int, follows: bool, past: History, nodes: int) -> GuessTree:
    """`Lookup.guess`, with what changes from call to call at the end."""
    return lookup.guess(past, nodes, depth, follows)


class PromptLookup(Lookup):
    """A chain of up to `depth` tokens copied from the row's own past."""

    def __init__(self, depth: int, least: int = 1):
        """Matches of fewer than `least` tokens do not count. Raises UserError for a depth of 0."""
        if depth < 1:
            raise UserError(f"prompt lookup must draft at least 1 token, got {depth}")
        self.least = least
        self.depth = self.most_drawn = depth
        self.budgets = free_budgets(depth + 1)
        self.matches = MatchRecord()

    def guess(self, past: History, nodes: int, depth: int, follows: bool = True) -> GuessTree:
        tokens = past.continuation(min(nodes, depth, self.depth), self.least)
        scores = self.matches.log_chances(past.matched(self.least), len(tokens))
        return GuessTree.chain(tokens, scores)


def drawn_chain(
    texts: Sequence[Sequence[int]],
    distribution: Distribution,
    depth: int,
    sampling: Sampling,
    random: RowRandom,
) -> TokenTree:
    """A chain of `depth` drawn tokens after each row's text, with what they were drawn from."""
    numbers = torch.tensor(to_host(random.uniform(depth)), dtype=torch.float64)  # [B, depth]
    rows = [list(text) for text in texts]
    supports: list[list[Support]] = [[] for _ in rows]
    for level in range(depth):
        known = [distribution(row) for row in rows]
        probs = draft_distribution(logits_of(known), sampling)
        places = sample(probs, numbers[:, level]).tolist()
        for number, (ids, place) in enumerate(zip(map(list, known), places, strict=True)):
            supports[number].append((ids, probs[number, : len(ids)].tolist()))
            rows[number].append(ids[place])
    # The last node has no children, but the tables have a row for it.
    ids_table, probs_table = support_tables([[*row, row[-1]] for row in supports])
    tokens = torch.tensor([row[-1 - depth :] for row in rows], device=random.device)
    shape, device = TreeShape.chain(depth), random.device
    return TokenTree.from_shape(shape, tokens, ids_table.to(device), probs_table.to(device))


def logits_of(known: Sequence[Mapping[int, float]]) -> torch.Tensor:
    """Logarithms of probabilities, float64 [B, k]; -inf where a row has fewer than another."""
    logs = [torch.tensor([*row.values()], dtype=torch.float64).log() for row in known]
    return pad_sequence(logs, batch_first=True, padding_value=-torch.inf)


def support_tables(
    supports: Sequence[Sequence[Support]],  # of each node of each row
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, N, k] both
    """Supports of different sizes as tables; what is missing are tokens of probability 0.

    They are tokens of other supports, so that all of one support are different.
    """
    every = [support for row in supports for support in row]
    most = max(len(ids) for ids, _ in every)
    known = sorted({token for ids, _ in every for token in ids})
    ids, probs = [], []
    for own, chances in every:
        missing = most - len(own)
        others = [token for token in known if token not in own][:missing] if missing else []
        ids.append([*own, *others])
        probs.append([*chances, *[0.0] * missing])
    shape = len(supports), len(supports[0]), most
    return torch.tensor(ids).view(shape), torch.tensor(probs, dtype=torch.float64).view(shape)
