"""What every draft head is: a module with a loss for training and a session for decoding.

A head family is one file that defines a config dataclass and a `DraftHead` registered under the
family's name; training, decoding, tests and comparison find it in `HEADS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, SamplingConfig
from drafthead.heads.target.target import Features, FeatureSpec, Target
from drafthead.heads.trees.recipe import Outline
from drafthead.heads.trees.tree import Budget, Path, TokenTree, TreeShape

# What an unknown drafter is taken to achieve until it is seen to do better or worse.
UNMEASURED_ALPHA = 0.6

# Guesses beyond this rank are never put into a tree.
MAX_RANK = 10


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

    def outline(self, budget: Budget) -> Outline | None:
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
        """Compile what `propose` runs, if there is something to compile; see heads.graphs.compiled."""

    @abstractmethod
    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T], right-padded, of the given lengths [B]."""


@dataclass(frozen=True)
class HeadBatch:
    """Token sequences with the target's features, for training and for measuring.

    Several conversations may share a row: `segments` numbers them from 1 and is 0 on padding.
    """

    input_ids: torch.Tensor  # [B, T]
    segments: torch.Tensor  # [B, T]
    supervised: torch.Tensor  # [B, T] bool: this token is to be learnt
    features: Features  # [B, T, D] of the target at these positions
    # [B, T] bool: of the supervised tokens, those that the head drafts behind; None for all.
    roots: torch.Tensor | None = None

    def num_supervised(self) -> torch.Tensor:
        """Number of supervised tokens, the unit in which losses are averaged."""
        return self.supervised.sum()


@dataclass(frozen=True)
class HeadLoss:
    """The loss of a batch and what it says of each depth.

    Depth k guesses the k-th token behind the root. `ranks` are the head's ranks of the true tokens,
    0 for its best guess and MAX_RANK for any rank from MAX_RANK on, a position past the end or a
    depth that this loss does not look at.
    """

    total: torch.Tensor  # scalar, summed over positions and weighted over depths
    depth_losses: torch.Tensor  # [K], detached sums
    depth_counts: torch.Tensor  # [K] positions that have a true token at that depth
    ranks: torch.Tensor  # [A, K] for the A positions that have a root


class DraftHead(nn.Module, ABC):
    """A trained module that drafts from the target's features."""

    family: ClassVar[str]
    config_class: ClassVar[type]

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        # How often each path of guesses was right on held-out answers, the empty path being right
        # everywhere; None for a head that was never measured.
        self.path_counts: dict[Path, int] | None = None

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        """`config` with the sizes that it leaves open, as 0, filled in from the target.

        Raises UserError when it asks for another width or vocabulary than the target's.
        """
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        sizes = {f.name: sizes[f.name] for f in fields(config) if f.name in sizes}
        for name, size in sizes.items():
            if getattr(config, name) not in (0, size):
                raise UserError(
                    f"head.{name} is {getattr(config, name)}, but the target's is {size}"
                )
        return replace(config, **sizes)

    @property
    @abstractmethod
    def features_needed(self) -> FeatureSpec:
        """Which hidden states of the target the head reads."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number K of tokens that the head drafts behind the root."""

    def prepare(self, token_counts: torch.Tensor) -> None:
        """Take note of how often each token [V] is to be learnt; called before `initialize`.

        For heads that guess among the frequent tokens only; the others need not know.
        """

    @abstractmethod
    def initialize(self, target: Target) -> None:
        """Give a fresh head the start that its family trains from, such as copied weights."""

    @abstractmethod
    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """The training loss of a batch."""

    @abstractmethod
    def drafter(self, target: Target, shape: TreeShape | None = None) -> Drafter:
        """The head as a drafter of trees of the given shape, or of its own choice by budget."""


HEADS: dict[str, type[DraftHead]] = {}


def register_head(family: str, config_class: type) -> Callable[[type[DraftHead]], type[DraftHead]]:
    """Make a head family known by name; raises ValueError when the name is taken."""

    def register(cls: type[DraftHead]) -> type[DraftHead]:
        if family in HEADS:
            raise ValueError(f"two head families are called {family!r}")
        cls.family, cls.config_class = family, config_class
        HEADS[family] = cls
        return cls

    return register


def head_family(name: str) -> type[DraftHead]:
    """The head class called `name`; raises UserError that lists the known families."""
    if name not in HEADS:
        raise UserError(f"unknown head family {name!r}; known families: {', '.join(sorted(HEADS))}")
    return HEADS[name]
