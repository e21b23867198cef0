"""What is worth saying about training data before a head is trained on it."""

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from drafthead.heads.errors import UserError
from drafthead.train.data.conversations import Writer
from drafthead.train.data.packing import PackedData

logger = logging.getLogger(__name__)


def check_writers(
    source: str, writers: Iterable[Writer | None], target_name: str, weights: str
) -> None:
    """Log when answers are not, or may not be, the target's own; None wrote rows that do not say.

    `weights` is the target's `weights_fingerprint`, which goes before its name.
    """
    own = Writer(target_name, weights)
    others = {w.name for w in writers if w is not None and not _same(w, own)}
    if others:
        logger.warning(
            "%s holds answers of %s, and the head is for %s: distil its own answers, or the head "
            "learns to guess another model",
            source,
            ", ".join(sorted(others)),
            target_name,
        )
    if None in writers:
        logger.warning(
            "%s has rows that do not say which model answered: heads learn best from the target's "
            "own answers, see `drafthead distill`",
            source,
        )


def _same(writer: Writer, own: Writer) -> bool:
    if writer.weights is not None:
        return writer.weights == own.weights
    return Path(writer.name).resolve() == Path(own.name).resolve()  # hub ids stay what they are


def check_held_out(train: PackedData, held_out: PackedData, name: str) -> None:
    """Log how many held-out sequences are in the training data as well.

    Raises UserError, with the `name` of the held-out data, when all of them are.
    """
    total = len(held_out.sequences)
    shared = int(np.isin(held_out.sequences.digests, train.sequences.digests).sum())
    if shared == total:
        raise UserError(
            f"everything in {name} is training data as well: hold some conversations out, or leave "
            "data.validation out"
        )
    if shared:
        logger.warning(
            "%d of %d conversations in %s are training data as well: the head's tau there is too "
            "high",
            shared,
            total,
            name,
        )
