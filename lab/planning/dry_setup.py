"""A training run set up without memory: its target and head have shapes and no numbers.

The head is made by the code that makes it for training. Of the target only `config.json` is read,
and its tokenizer if it has one.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig

from drafthead.core.errors import UserError, first_line
from drafthead.core.target.gguf_files import model_folder
from drafthead.core.target.loading import decoder_class, dtype_named, has_encoder, load_tokenizer
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import BITSANDBYTES
from drafthead.heads.base import DraftHead
from drafthead.lab.planning.dry_run import DryRun, Ledger
from drafthead.train.data.packing import PackedData, RowOrder, TokenBatch
from drafthead.train.data.training_rows import training_data
from drafthead.train.features.reading import TargetConfig, check_row_length, dtype_for
from drafthead.train.run.config import Duration, RunConfig
from drafthead.train.run.trainables import new_head

STEPS_LOOKED_AT = 200  # for the micro-batch with the most to learn


@dataclass(frozen=True)
class DrySetup:
    """A run's target and head without numbers, and the micro-batch that its memory follows from."""

    config: RunConfig
    dry: DryRun
    target: Target
    head: DraftHead
    rows: PackedData | None  # None without a tokenizer
    tokens: TokenBatch  # [B, T]


def dry_setup(
    config: RunConfig, rows: PackedData | None = None, *, has_data: bool = True
) -> DrySetup:
    """Set up the run of a configuration; UserError for what training would refuse.

    `rows` were read for another configuration with the same data; longer ones are cut. Without data
    yet, all rows are taken to be full.
    """
    dry = DryRun(Ledger(lambda tensor: "setup"))
    with dry:
        target = dry_target(config.target, config.train.mixed_precision)
    check_row_length(target, config.target.name, config.data.max_length)
    if rows is None and has_data:
        rows = read_rows(config, target)
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    if rows is not None:
        counts = rows.sequences.token_counts(target.vocab_size)
    with dry:
        head = new_head(config.family, config.head, target, counts)
    tokens = full_rows(config) if rows is None else heaviest(rows, config)
    here = slice(None), slice(config.data.max_length)
    tokens = TokenBatch(tokens.input_ids[here], tokens.segments[here], tokens.supervised[here])
    return DrySetup(config, dry, target, head.train(), rows, tokens)


def dry_target(config: TargetConfig, mixed_precision: str) -> Target:
    """The target without numbers; UserError where its sizes do not follow from `config.json`."""
    wanted = dtype_for(config, mixed_precision)
    if config.placement != "whole" or wanted in BITSANDBYTES:
        raise UserError(
            f"target.placement={config.placement} with target.dtype={wanted} cannot be planned: "
            "only targets that are whole on their device, in numbers of 16 or 32 bits"
        )
    source = model_folder(config.name)
    Target.check_kind(config.name, has_encoder(source, config.trust_code))
    try:
        shape = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_code)
    except Exception as error:  # transformers raises many kinds for a bad folder
        raise UserError(f"cannot read config.json of {config.name}: {first_line(error)}") from error
    if getattr(shape, "quantization_config", None) is not None:
        raise UserError(
            f"{config.name} has quantised weights, whose sizes do not follow from its config.json: "
            "plan with the model that it was made from"
        )
    stored = shape.dtype or torch.float32
    model = decoder_class(shape).from_config(
        shape,
        dtype=stored if wanted == "auto" else dtype_named(wanted),
        trust_remote_code=config.trust_code,
    )
    model.eval().requires_grad_(False)
    return Target(model, load_tokenizer(source, str(source), config.trust_code))


def read_rows(config: RunConfig, target: Target) -> PackedData | None:
    """The rows that training reads; None without a tokenizer, UserError as `training_data`."""
    if target.tokenizer is None:
        return None
    seed = config.train.seed
    return training_data(config.data, target.tokenizer, seed, target.vocab_size)[0]


def full_rows(config: RunConfig) -> TokenBatch:
    """A micro-batch [B, T] of full rows in which all is learnt: nothing needs more."""
    ids = torch.zeros(config.train.micro_batch_rows, config.data.max_length, dtype=torch.long)
    return TokenBatch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))


def heaviest(rows: PackedData, config: RunConfig) -> TokenBatch:
    """The micro-batch [B, T] with the most supervised tokens of the run's first steps."""
    train = config.train
    order = RowOrder(len(rows.rows), train.batch_rows, train.seed)
    duration = Duration.of(train, len(rows.rows))
    steps = int(duration.limit) if duration.unit == "step" else STEPS_LOOKED_AT
    read = [row for step in range(min(steps, STEPS_LOOKED_AT)) for row in order.rows_of_step(step)]
    size = train.micro_batch_rows
    batches = [read[i : i + size] for i in range(0, len(read), size)]
    return rows.batch(max(batches, key=rows.supervised_in))
