"""A trained head as a drafter, and which class of drafter serves which class of head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from drafthead.core.backend import EAGER, Backend, backend_for
from drafthead.core.coupling import Choice
from drafthead.core.dims import Spec
from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.cache_memory import FRESH, FreshMemory
from drafthead.core.kv_cache.column_cache import TreeKernels, visible_columns
from drafthead.core.sampling import DRAFT_SUPPORT, RowRandom, largest
from drafthead.core.target.target import Target
from drafthead.core.target.weight_state import state_of
from drafthead.core.trees.tree import Budget, TreeShape
from drafthead.heads.base import DraftHead, drafting_fields
from drafthead.heads.growing.dynamic import best_tree
from drafthead.heads.growing.levels import Guesses, Level, best_guesses, levels_of
from drafthead.heads.growing.static import StaticTrees
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.layers.decoder_layer import frequencies_in

# More positions than any tree brings: a part of a prompt, and seldom of the same length again.
LONG = 64

Head = TypeVar("Head", bound=DraftHead)
Value = TypeVar("Value")


class HeadDrafter(Drafter, Generic[Head]):
    """A head with the target that it drafts for, and the static trees that it may fill."""

    names = ("head",)
    on_device = False  # whether its sessions are `OnDevice`
    # Functions that kernels may take the place of.
    with_kernels: ClassVar[tuple[str, ...]] = ("largest", "visible_columns", "best_tree")

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
        self.num_guesses = min(DRAFT_SUPPORT, getattr(head, "num_guesses", target.vocab_size))
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
        # What draws trees, and may be kernels of ours.
        self.largest, self.visible_columns, self.best_tree = largest, visible_columns, best_tree
        self.features = head.features_needed
        self.backend: Backend = EAGER
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

    @property
    def read_by_graphs(self) -> tuple[object, ...]:
        """Return what compiled drafting reads beside its arguments, see `Backend`."""
        return self.head, self.target.model, *frequencies_in(self.head)

    def is_prompt(self, cache: DraftCache, positions: int) -> bool:
        """Whether so many positions are read as prompts are: the first ones, and where calls are
        recorded any that are many.
        """
        return cache.is_empty or (self.memory.is_recorded and positions > LONG)

    def prepare(self, target: Target | None) -> None:
        """Draft from now on as this target's passes run: by our kernels, compiled or recorded."""
        self.target = target or self.target
        its = self.target.backend
        if its.has_kernels and not its.compiles:
            self.backend, self.head = its, its.packed(self.given)
            for name in self.with_kernels:
                setattr(self, name, its.replacement_of(getattr(self, name)))
        else:
            self.backend = backend_for(self.target.device, self.target.dtype, its.fuses)
            its.forget_also(self.backend)
        self.memory, self.kernels = self.backend.memory, self.target.kernels

    def follow_weights(self) -> None:
        """Run the head with its weights as they are now; called when a session starts."""
        if (state := state_of(self.given)) != self.state:
            self.head, self.state = self.backend.packed(self.given), state

    def compiled(
        self, function: Callable[..., Any], dims: Mapping[str, Spec], *reads: object
    ) -> Callable[..., Any]:
        """A pass of the draft, compiled; `reads` come beside what is `read_by_graphs`."""
        return self.backend.compile(function, dims, (*self.read_by_graphs, *reads))

    def compiled_readers(
        self, function: Callable[..., Value], dims: Mapping[str, Spec]
    ) -> tuple[Callable[..., Value], Callable[..., Value]]:
        """A compiled pass over committed positions, and how a prompt is read.

        Prompts are seldom of one length: where calls are recorded, each would be recorded once and
        used once. Our kernels serve all lengths.
        """
        compiled = self.compiled(function, dims)
        return compiled, compiled if self.backend.has_kernels else function

    def best_guesses(self, logits: torch.Tensor, count: int = DRAFT_SUPPORT) -> Guesses:
        """`growing.levels.best_guesses` of logits [B, n, Vd]."""
        # A head without a draft vocabulary need not have `tokens_of`.
        tokens_of = getattr(self.head, "tokens_of", torch.Tensor.long)
        return best_guesses(logits, tokens_of, count, self.largest)

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
