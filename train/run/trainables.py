"""Trainable families by their names: draft heads and draft models."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead
from drafthead.heads.formats.drafthead import save_head
from drafthead.heads.formats.loading import load_head
from drafthead.heads.layers.decoder_layer import DecoderLayer
from drafthead.train.draft_models.student import (
    FAMILY,
    Student,
    draft_model_weights,
    save_draft_model,
)

logger = logging.getLogger(__name__)


def trainable(family: str) -> type[DraftHead]:
    """The class of a family; raises UserError that lists the known ones."""
    classes: dict[str, type[DraftHead]] = {**HEADS, FAMILY: Student}
    if family not in classes:
        known = ", ".join(sorted(classes))
        raise UserError(f"unknown head family {family!r}; known families: {known}")
    return classes[family]


def noun_of(head: DraftHead) -> str:
    """Return what a run trains, in words."""
    return "draft model" if isinstance(head, Student) else "head"


def save_trained(
    head: DraftHead, folder: Path, target: Target, target_name: str, origin: dict[str, Any]
) -> None:
    """Write what a run has trained, in the type of the target; `origin` is what JSON can hold."""
    if isinstance(head, Student):
        save_draft_model(head, folder, target, target_name, origin)
    else:
        save_head(head, folder, target, target_name, origin, dtype=target.dtype)


def trained_weights(head: DraftHead, folder: Path, target: Target) -> dict[str, torch.Tensor]:
    """The weights of what stands in a folder, by the names that `head` has for them.

    Raises UserError when it is of another family.
    """
    if isinstance(head, Student):
        return draft_model_weights(folder)
    trained = load_head(folder, target)
    if trained.family != head.family:
        raise UserError(
            f"train.init_from={folder} is a head of the family {trained.family}, and head.family "
            f"is {head.family}"
        )
    return trained.state_dict()


def new_head(
    family: str,
    config: Any,
    target: Target,
    token_counts: torch.Tensor,
    init_from: str | None = None,
) -> DraftHead:
    """A head of the target's sizes; token v is supervised token_counts[v] times, [V].

    It is fresh, or begins with the weights of the head in the folder `init_from`. Raises UserError
    when it cannot have the configured sizes, or those weights.
    """
    cls = trainable(family)
    check_taps(cls, config, target)
    head = cls(cls.sized(config, target))
    head.prepare(token_counts)
    head.initialize(target)
    if init_from is not None:
        begin_with(head, init_from, target)
    return head


def begin_with(head: DraftHead, source: str, target: Target) -> None:
    """Give a fresh head the weights, and the draft vocabulary, of the head in a folder.

    Layers beyond those of that head come last and change nothing at first. Raises UserError when it
    is of another family or, but for that, of another shape.
    """
    found = trained_weights(head, Path(source), target)
    found |= silent_layers(head, found)
    wanted = head.state_dict()
    for name in sorted({*wanted, *found}):
        shapes = [tuple(part[name].shape) if name in part else None for part in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"train.init_from={source} has another shape: {name} is {shapes[0]} there, and "
                f"{shapes[1]} by the section head"
            )
    head.load_state_dict(found)


def silent_layers(head: DraftHead, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights [...] for layers of a head of which nothing is found: they add zeros."""
    weights: dict[str, torch.Tensor] = {}
    for name, layer in head.named_modules():
        if isinstance(layer, DecoderLayer) and not any(k.startswith(f"{name}.") for k in found):
            layer.silence()
            weights |= layer.state_dict(prefix=f"{name}.")
    return weights


def check_taps(cls: type[DraftHead], config: Any, target: Target) -> None:
    """Log when the taps that a configuration names are not the usual ones for this target."""
    chosen = getattr(config, "taps", ())
    usual = cls.sized(replace(config, taps=()), target).taps if chosen else chosen
    if tuple(chosen) != tuple(usual):
        logger.warning(
            "head.taps is %s; without that setting it would be %s, for the target's %d layers",
            list(chosen),
            list(usual),
            target.num_layers,
        )
