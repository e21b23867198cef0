"""A trained head as a drafter, and which class of drafter serves which class of head."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from drafthead.core.backend import EAGER, Backend
from drafthead.core.coupling import Choice
from drafthead.core.drafting.drafter import Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.column_cache import FRESH, FreshMemory, TreeKernels
from drafthead.core.sampling import DRAFT_SUPPORT, RowRandom, Sampling
from drafthead.core.target.target import Target
from drafthead.core.target.weight_state import state_of
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.heads.base import DraftHead, drafting_fields
from drafthead.heads.growing.dynamic import Operations
from drafthead.heads.growing.levels import Expand, Guess, Level, filled_tree, levels_of
from drafthead.heads.growing.static import StaticTrees
from drafthead.heads.layers.cache import DraftCache

# More positions than any tree brings: a part of a prompt, and seldom of the same length again.
LONG = 64

Head = TypeVar("Head", bound=DraftHead)
Function = TypeVar("Function", bound=Callable[..., Any])


class HeadDrafter(Drafter, Generic[Head]):
    """A head with the target that it drafts for, and the static trees that it may fill.

    Its passes are functions of tensors, which sessions call by `whole`, and these their own parts
    by `part`: as they are, by our kernels, or recorded, as the target's backend has it.
    """

    names = ("head",)

    def __init__(
        self,
        head: Head,
        target: Target,
        shape: TreeShape | None,
        budgets: tuple[Budget, ...] | None = None,
    ):
        """Trees of a fixed `shape`, or else of the head's own choice within one of `budgets`, by
        default those of static trees.

        Raises UserError when the shape is deeper than the head drafts, or wider than it guesses.
        """
        # For each node.
        self.num_guesses = min(DRAFT_SUPPORT, head.num_guesses)
        if shape is not None and shape.width > self.num_guesses:
            raise UserError(
                f"a token tree with {shape.width} children of a node does not fit a {head.family} "
                f"head that has {self.num_guesses} guesses for each"
            )
        if shape is not None and shape.depth > head.depth:
            raise UserError(
                f"a token tree of depth {shape.depth} does not fit a {head.family} head that "
                f"drafts {head.depth} tokens"
            )
        self.head, self.target, self.fixed = head, target, shape
        self.given, self.state = head, state_of(head)  # as it is; `head` may be its twin
        self.operations = Operations()
        self.features = head.features_needed
        self.backend: Backend = EAGER
        self.called: dict[tuple[object, str], Any] = {}  # functions as they are called
        self.memory: FreshMemory = FRESH  # of its caches
        self.kernels: TreeKernels | None = None  # of recorded passes, where the target has some
        usual = tuple(path for path in head.usual_paths if max(path) < self.num_guesses)
        self.trees = StaticTrees(head.path_counts, head.depth, shape, usual)
        sizes = self.trees.budgets if shape is not None or budgets is None else budgets
        # As measured after training for the best static tree of each size.
        self.budgets = tuple(replace(b, chances=self.trees.chances(b) or ()) for b in sizes)
        self.known_levels: dict[TreeShape, list[Level]] = {}
        self.known_scores: dict[TreeShape, torch.Tensor] = {}
        self.known_slots: dict[int, torch.Tensor] = {}

    def is_prompt(self, cache: DraftCache, positions: int) -> bool:
        """Whether so many positions are read as prompts are: the first ones, and where calls are
        recorded any that are many.
        """
        return cache.longest == 0 or (self.memory.is_recorded and positions > LONG)

    def compile(self, target: Target) -> None:
        self.target, self.backend, self.called = target, target.backend.another(), {}
        self.head, self.operations = self.backend.packed(self.given), Operations.of(self.backend)
        self.memory, self.kernels = self.backend.memory, target.kernels

    def whole(self, function: Function) -> Function:
        """A function of tensors as a session calls it."""
        return self._called(function, self.backend.record)

    def part(self, function: Function) -> Function:
        """A function of tensors as one that is called by `whole` calls it in turn."""
        return self._called(function, self.backend.fused)

    def _called(self, function: Function, made: Callable[[Function], Any]) -> Function:
        key = function, made.__name__
        if key not in self.called:
            self.called[key] = made(function)
        found: Function = self.called[key]
        return found

    def reading(self, function: Function, is_prompt: bool) -> Function:
        """A pass over committed positions as a session calls it.

        Prompts are seldom of one length: where calls are recorded, each would be recorded once and
        used once. Our kernels serve all lengths.
        """
        return function if is_prompt and self.backend.records else self.whole(function)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:  # [B, T], [B]
        """A session of the head with its weights as they are now."""
        if (state := state_of(self.given)) != self.state:
            self.head, self.state = self.backend.packed(self.given), state
        return self.session(len(lengths))

    @abstractmethod
    def session(self, rows: int) -> DraftSession:
        """A session of so many rows, which has read nothing."""

    def guess(
        self,
        states: torch.Tensor,  # [B, n, S]
        logits: torch.Tensor,  # [B, n, Vd]
        count: int = DRAFT_SUPPORT,
    ) -> Guess:
        """The `count` best guesses of the children of n nodes."""
        best, places, total = self.operations.largest(logits, count)
        return Guess(states, best, self.head.tokens_of(places), total)

    def filled(
        self,
        budget: Budget,
        roots: torch.Tensor,  # [B]
        states: torch.Tensor,  # [B, 1, S] before the roots
        expand: Expand,
        sampling: Sampling,
        random: Choice,
    ) -> TokenTree:
        """The static tree for a budget: the best guesses, or children drawn as `random` says."""
        shape = self.shape(budget, random)
        how = expand, sampling, random, self.scores(shape)
        return filled_tree(shape, self.levels(shape), roots, states, *how)

    def slots(self, count: int) -> torch.Tensor:
        """The numbers [count] from 0 on, made once."""
        if count not in self.known_slots:
            self.known_slots[count] = torch.arange(count, device=self.target.device)
        return self.known_slots[count]

    def levels(self, shape: TreeShape) -> list[Level]:
        """The levels of a static tree, made once for each shape."""
        if shape not in self.known_levels:
            self.known_levels[shape] = levels_of(shape, self.target.device)
        return self.known_levels[shape]

    def scores(self, shape: TreeShape) -> torch.Tensor:
        """The scores [N] of the nodes of a static tree by what was measured, made once."""
        if shape not in self.known_scores:
            scores = self.trees.scores(shape)
            self.known_scores[shape] = torch.tensor(scores, device=self.target.device)
        return self.known_scores[shape]

    def shape(self, budget: Budget, random: Choice) -> TreeShape:
        """The static tree for a budget; with a `RowRandom`, one whose children can be drawn."""
        shape = self.trees.shape(budget)
        return shape.gapless if isinstance(random, RowRandom) else shape

    def __repr__(self) -> str:
        return repr((self.head.family, drafting_fields(self.head.config), self.fixed))


HEAD_DRAFTERS: dict[type, type[HeadDrafter[Any]]] = {}  # by class of heads

DrafterClass = TypeVar("DrafterClass", bound=type[HeadDrafter[Any]])


def register_head_drafter(head_class: type) -> Callable[[DrafterClass], DrafterClass]:
    """Make a drafter class serve a class of heads and its subclasses.

    Raises ValueError when the class of heads already has a drafter.
    """

    def register(cls: DrafterClass) -> DrafterClass:
        if head_class in HEAD_DRAFTERS:
            raise ValueError(
                f"{head_class.__name__} already has a drafter: {HEAD_DRAFTERS[head_class]}"
            )
        HEAD_DRAFTERS[head_class] = cls
        return cls

    return register


def drafter_for(
    head: DraftHead, target: Target, shape: TreeShape | None = None
) -> HeadDrafter[Any]:
    """The head as a drafter of trees of the given shape, or of its own choice by budget.

    Raises UserError when the shape is deeper than the head drafts, and TypeError when no drafter is
    registered for the class of the head or a class above it.
    """
    for cls in type(head).__mro__:
        if cls in HEAD_DRAFTERS:
            return HEAD_DRAFTERS[cls](head, target, shape)
    kind = type(head).__name__
    raise TypeError(f"no drafter is registered for {kind}: see register_head_drafter")
