"""What every drafter is: it proposes token trees and learns what the target committed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.trees.recipe import TreeRecipe
from drafthead.heads.trees.tree import Budget, TokenTree

# What an unknown drafter is taken to achieve until it is seen to do better or worse.
UNMEASURED_ALPHA = 0.6


def at_last(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Of table [B, T, ...] what stands at each row's last position, [B, ...].

    Lengths 3 and 1 take place 2 of the first row and place 0 of the second.
    """
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return table[rows, lengths - 1]


class Ends(NamedTuple):
    """What stands at the last committed position of each row."""

    roots: torch.Tensor  # [B] the tokens that follow
    hidden: torch.Tensor | None  # [B, D] of the target's last hidden state, where it is kept


@dataclass(frozen=True)
class Committed:
    """What the target committed in one pass, as a drafter needs it to go on.

    Row by row: the positions whose cache rows were kept, the target's features there, and the
    token that follows each of them. After a pass that accepted "b c" behind root "a" and gave the
    bonus token "d", the positions are those of a, b, c and the tokens are b, c, d. Positions at or
    beyond a row's length are padding. The last token is the next root.
    """

    tokens: torch.Tensor  # [B, T]
    features: Features  # of [B, T] positions
    lengths: torch.Tensor  # [B], at least 1
    width: int | None = None  # the largest length, where T may be larger
    known_ends: Ends | None = None

    @cached_property
    def ends(self) -> Ends:
        """The next roots and what predicted them; no work where the pass itself has told."""
        if self.known_ends is not None:
            return self.known_ends
        last = self.features.last
        hidden = None if last is None else at_last(last, self.lengths)
        return Ends(at_last(self.tokens, self.lengths), hidden)

    def cut(self) -> "Committed":
        """The same without the positions that are padding in every row.

        In memory of its own, for compiled drafters: otherwise the distance from row to row would be
        that of the larger table, and its every size would need another graph, if only for one row.
        """
        if self.width in (None, self.tokens.shape[1]):
            return self

        def cut(part: torch.Tensor) -> torch.Tensor:
            return part[:, : self.width].clone(memory_format=torch.contiguous_format)

        return Committed(
            cut(self.tokens), self.features.map(cut), self.lengths, None, self.known_ends
        )


class DraftSession(ABC):
    """A drafter at work on one batch: proposes a tree, learns what was committed, and again."""

    @abstractmethod
    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """A tree within the budget behind the last committed token.

        With `random`, children are drawn without replacement and the tree carries the
        distributions they were drawn from; without, children are the most probable tokens.
        """

    def recipe(self, budget: Budget) -> TreeRecipe | None:
        """`propose` without `random` as a part of the graph of a step, for what can be one."""
        return None

    @abstractmethod
    def commit(self, committed: Committed) -> None:
        """Take in what the target committed; called after the prompt pass and after every step.

        A step may have passed without a proposal.
        """

    @abstractmethod
    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with the rows [R] of the batch only, in that order."""


class Drafter(ABC):
    """Whatever proposes tokens: a head, a draft model, prompt lookup."""

    features: FeatureSpec
    budgets: tuple[Budget, ...]  # those that it can make use of, from small to large

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """How likely a proposal within the budget is accepted to depth 1, 2, ...

        What is known before decoding; a drafter that was never measured says UNMEASURED_ALPHA of
        the depth before.
        """
        return tuple(UNMEASURED_ALPHA**depth for depth in range(1, budget.depth + 1))

    def identity(self) -> str:
        """What the time of a proposal depends on, beside its budget and the target."""
        return type(self).__name__

    def compile(self) -> None:  # noqa: B027  (nothing to compile is a good default)
        """Compile what `propose` runs, if there is something to compile; see heads.graphs."""

    @abstractmethod
    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T], right-padded, of the given lengths [B]."""


class NoDrafter(Drafter):
    """What plain decoding drafts with: nothing."""

    features = FeatureSpec(layers=(), last=False)
    budgets = ()

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session that is never asked for a tree."""
        return NoDraft()


class NoDraft(DraftSession):
    """A session without a memory."""

    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """Raises NotImplementedError: steps without a drafter have no budget."""
        raise NotImplementedError

    def commit(self, committed: Committed) -> None:
        """Nothing to remember."""

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Nothing to drop."""
