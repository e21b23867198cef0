"""The rows that a head is trained on, and those that it is measured on."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.train.data.conversations import Writer
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.packing import PackedData, pack_sequences
from drafthead.train.data.sequences import mixed
from drafthead.train.data.token_table import token_table
from drafthead.train.settings import DataConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sources:
    """Hashes of what a run learns from; a run that goes on must have the same."""

    data: str  # see `PackedData.fingerprint`
    target: str  # see `weights_fingerprint`


def training_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    vocab_size: int | None = None,
) -> tuple[PackedData, PackedData | None]:
    """The rows to train on, and those to measure on if the configuration asks for any.

    `vocab_size` is the number of tokens that the target has. Raises UserError for data that cannot
    be read, has nothing to learn or nothing to measure on.
    """
    rows = load_packed(config.sources, tokenizer, config, seed, None, vocab_size)
    if config.validation is not None:
        source = {config.validation: 1.0}
        held_out = load_packed(source, tokenizer, config, 0, config.max_validation, vocab_size)
        check_held_out(rows, held_out, config.validation)
        return rows, held_out
    if config.validation_share is not None:
        return parted(rows, config.validation_share, config, seed)
    return rows, None


def load_packed(
    sources: Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    seed: int,
    limit: int | None = None,
    vocab_size: int | None = None,
) -> PackedData:
    """Read, tokenise, mix and pack sources by their weights, at most `limit` rows of each.

    `vocab_size` is the number of tokens that the target has. Raises UserError for data that cannot
    be read or has nothing to learn.
    """
    tables = [
        token_table(
            Reading(
                source, config.prompt_column, config.max_length, limit, vocab_size,
                config.template_arguments, config.strict,
            ),
            tokenizer,
        )
        for source in sources
    ]  # fmt: skip
    weights = list(sources.values())
    table = tables[0] if weights == [1.0] else mixed(tables, weights, seed)
    if not len(table):
        raise UserError(f"weights {weights} leave no conversation of {', '.join(sources)}")
    return pack_sequences(table, config.max_length, seed)


def parted(
    rows: PackedData, share: float, config: DataConfig, seed: int
) -> tuple[PackedData, PackedData]:
    """The rows without a share of their conversations, and rows of these.

    Raises UserError where one of the two would be empty.
    """
    left, apart = rows.sequences.parted(share, config.max_validation)
    if not len(left) or not len(apart):
        raise UserError(
            f"data.validation_share={share} leaves {len(left)} conversations to train on and "
            f"{len(apart)} to measure on, of {len(rows.sequences)}: choose another share"
        )
    held_out = pack_sequences(apart, config.max_length, 0)
    return pack_sequences(left, config.max_length, seed), held_out


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
            "own answers, see `drafthead data distill`",
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
