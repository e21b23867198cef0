"""The base of every draft head: a module with a loss for training and a session for decoding.

A head family is a config dataclass and a `DraftHead` registered under the family's name; training,
decoding, tests and comparison find it in `HEADS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import nn

from drafthead.core.errors import UserError
from drafthead.core.registry import Registry
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Path
from drafthead.heads.objectives.batch import HeadBatch, HeadLoss


class DraftHead(nn.Module, ABC):
    """A trained module that drafts from the target's features."""

    family: ClassVar[str]
    config_class: ClassVar[type]
    # The paths of guesses that a head of the family verifies until its own were measured.
    usual_paths: ClassVar[tuple[Path, ...]] = ()

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        # How often each path of guesses was right on held-out answers; the empty path, always
        # right, counts the positions. None for a head that was never measured.
        self.path_counts: dict[Path, int] | None = None

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        """`config` with its open sizes, those that are 0, filled in from the target.

        Raises UserError when a size that is set differs from the target's.
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
        """Return which hidden states of the target the head reads."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number K of tokens that the head drafts after the root."""

    @property
    def num_guesses(self) -> int:
        """Number of tokens that the head guesses among: all, unless it has a draft vocabulary."""
        return int(self.config.vocab_size)

    def tokens_of(self, guesses: torch.Tensor) -> torch.Tensor:
        """The token ids [...] of guesses [...], which are places among the head's logits."""
        return guesses

    def prepare(self, token_counts: torch.Tensor) -> None:
        """Receive how often each token [V] occurs in training; called before `initialize`.

        For heads that guess among frequent tokens only; others ignore it.
        """

    @abstractmethod
    def initialize(self, target: Target) -> None:
        """Set a new head's initial weights, such as copies of the target's."""

    @abstractmethod
    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """The training loss of a batch."""


# The families here are imported, all together, when one of them is looked up.
HEADS = Registry[type[DraftHead]](
    dict.fromkeys(
        ("eagle", "eagle3", "hydra", "medusa", "mlp_speculator", "mtp", "parallel"),
        "drafthead.heads.families",
    )
)


def register_head(family: str, config_class: type) -> Callable[[type[DraftHead]], type[DraftHead]]:
    """Make a head family known by name; raises ValueError when the name is taken."""

    def register(cls: type[DraftHead]) -> type[DraftHead]:
        HEADS.register(family, cls, "head families")
        cls.family, cls.config_class = family, config_class
        return cls

    return register


def head_family(name: str) -> type[DraftHead]:
    """The head class called `name`; raises UserError that lists the known families."""
    if name not in HEADS:
        raise UserError(f"unknown head family {name!r}; known families: {', '.join(sorted(HEADS))}")
    return HEADS[name]


Value = TypeVar("Value")
MARK = "only training reads it"
# The type of a field of a head's configuration that only its training reads. Heads that differ in
# these alone take the same time for a draft, so that they share measured costs.
ForTraining = Annotated[Value, MARK]


def is_for_training(annotation: Any) -> bool:
    """Tell whether a field of this type is read by training alone."""
    return MARK in getattr(annotation, "__metadata__", ())


def drafting_fields(config: Any) -> dict[str, Any]:
    """The values of a dataclass by their names, without those that only training reads."""
    read = (field.name for field in fields(config) if not is_for_training(field.type))
    return {name: getattr(config, name) for name in read}
