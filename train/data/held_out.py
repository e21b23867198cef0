"""What a head is trained on, and what it is measured on."""

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.train.data.checks import check_held_out
from drafthead.train.data.packing import DataConfig, PackedData, load_packed, pack_sequences


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
