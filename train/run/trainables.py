"""What a run can train, by the name of its family: draft heads and draft models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.formats.checkpoint import load_head, save_head
from drafthead.heads.target.target import Target
from drafthead.train.draft_models.folder import draft_model_weights, save_draft_model
from drafthead.train.draft_models.student import FAMILY, Student


def trainable(family: str) -> type[DraftHead]:
    """The class of a family; raises UserError that lists the known ones."""
    classes: dict[str, type[DraftHead]] = {**HEADS, FAMILY: Student}
    if family not in classes:
        known = ", ".join(sorted(classes))
        raise UserError(f"unknown head family {family!r}; known families: {known}")
    return classes[family]


class Kind(NamedTuple):
    """How what a run trains is called, written and read again."""

    noun: str
    save: Callable[[Any, Path, Target, str, dict[str, Any]], None]  # head, folder, target, ...
    weights: Callable[[Any, Path, Target], dict[str, torch.Tensor]]  # of a trained one in a folder


def kind_of(head: DraftHead) -> Kind:
    """The kind of what a run trains."""
    return DRAFT_MODEL if isinstance(head, Student) else HEAD


def _save_head(
    head: DraftHead, folder: Path, target: Target, target_name: str, origin: dict[str, Any]
) -> None:
    save_head(head, folder, target, target_name, origin, dtype=target.dtype)


def _head_weights(head: DraftHead, folder: Path, target: Target) -> dict[str, torch.Tensor]:
    trained = load_head(folder, target)
    if trained.family != head.family:
        raise UserError(
            f"train.init_from={folder} is a head of the family {trained.family}, and head.family "
            f"is {head.family}"
        )
    return trained.state_dict()


HEAD = Kind("head", _save_head, _head_weights)
DRAFT_MODEL = Kind(
    "draft model", save_draft_model, lambda _head, folder, _target: draft_model_weights(folder)
)
