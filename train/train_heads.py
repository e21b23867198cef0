"""Entry point of training: `accelerate launch train/train_heads.py --config FILE`."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers.utils.logging import disable_progress_bar

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.layers.decoder_layer import DecoderLayer
from drafthead.heads.target.features import NO_FEATURES
from drafthead.heads.target.target import Target
from drafthead.train.data.checks import check_writers
from drafthead.train.data.held_out import training_data
from drafthead.train.data.packing import PackedData
from drafthead.train.features.kept import FeatureSource, KeptFeatures, feature_bytes
from drafthead.train.features.reading import load_target
from drafthead.train.jobs.full_disk import full_disk_named
from drafthead.train.jobs.host_memory import HostMemory
from drafthead.train.jobs.weights import weights_fingerprint
from drafthead.train.learning.engines import build_accelerator
from drafthead.train.learning.loop import Trainer
from drafthead.train.learning.step import TrainingTask
from drafthead.train.run.config import RunConfig, load_run_config
from drafthead.train.run.folder import RunFolder
from drafthead.train.run.precision import warn_of_slow_bfloat16
from drafthead.train.run.saved_states import Sources
from drafthead.train.run.starting_config import write_starting_config
from drafthead.train.run.trainables import kind_of, trainable

logger = logging.getLogger(__name__)

SECONDS_FOR_MAIN = 15


def train(config: RunConfig) -> bool:
    """Train a head as configured; False when it was stopped and can be continued."""
    accelerator = build_accelerator(config)
    folder = config.folder()
    lock = folder.locked() if accelerator.is_main_process else nullcontext()
    with full_disk_named(folder.path), lock:
        if folder.status(config.train.overwrite) == "finished":
            logger.info("%s holds this run, finished: nothing to do", folder.path)
            return True
        with logging_redirect_tqdm():
            finished = build_trainer(accelerator, config, folder).fit()
    accelerator.end_training()
    return finished


def build_trainer(accelerator: Accelerator, config: RunConfig, folder: RunFolder) -> Trainer:
    """Load target and data, and make the head."""
    memory = HostMemory(accelerator.device)
    set_seed(config.train.seed)
    data, precision = config.data, config.train.mixed_precision
    if accelerator.is_main_process:
        warn_of_slow_bfloat16(accelerator.device, precision)
    target = load_target(
        config.target, precision, data.max_length, accelerator.device, accelerator.num_processes
    )
    tokenizer = target.tokenizer
    assert tokenizer is not None  # a target read from disk has one
    rows, held_out = training_data(data, tokenizer, config.train.seed, target.vocab_size)
    table = rows.sequences
    sources = Sources(rows.fingerprint(), weights_fingerprint(target))
    check_writers(", ".join(data.sources), table.writers, config.target.name, sources.target)
    counts = table.token_counts(target.vocab_size)
    head = new_head(config.family, config.head, target, counts)
    if config.train.init_from is not None:
        begin_with(head, config.train.init_from, target)
    kept = kept_features(config, head, target, rows, sources)
    task = TrainingTask(target, config.target.name, head, sources, rows, held_out, kept)
    return Trainer(accelerator, task, config.train, config.optimizer, folder, memory)


def kept_features(
    config: RunConfig, head: DraftHead, target: Target, rows: PackedData, sources: Sources
) -> KeptFeatures | None:
    """The features of the training rows in `data.feature_folder`, if there is one.

    Raises UserError for a folder of something else, and when there is nothing to keep or no room.
    """
    data, dtype = config.data, str(target.dtype)
    if data.feature_folder is None:
        return None
    if head.features_needed == NO_FEATURES:
        raise UserError(
            "data.feature_folder keeps the target's features, of which a draft model with "
            f"head.loss={head.config.loss} reads none: leave it out"
        )
    as_int8 = data.feature_dtype == "int8"
    source = FeatureSource(
        sources.target,
        sources.data,
        f"int8 of {dtype}" if as_int8 else dtype,
        config.train.mixed_precision,
    )
    kept = KeptFeatures(Path(data.feature_folder), source, head.features_needed, as_int8)
    size = feature_bytes(head.features_needed, target.hidden_size, target.dtype, as_int8)
    lengths = [rows.row_length(row) for row in range(len(rows.rows))]
    kept.reserve([size * length for length in lengths], data.feature_budget_gb)
    return kept


def new_head(family: str, config: Any, target: Target, token_counts: torch.Tensor) -> DraftHead:
    """A fresh head of the target's sizes; token v is supervised token_counts[v] times, [V].

    Raises UserError when the head cannot have the configured sizes.
    """
    cls = trainable(family)
    check_taps(cls, config, target)
    head = cls(cls.sized(config, target))
    head.prepare(token_counts)
    head.initialize(target)
    return head


def begin_with(head: DraftHead, source: str, target: Target) -> None:
    """Give a fresh head the weights, and the draft vocabulary, of the head in a folder.

    Layers beyond those of that head come last and change nothing at first. Raises UserError when it
    is of another family or, but for that, of another shape.
    """
    found = kind_of(head).weights(head, Path(source), target)
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


def main(
    config: Annotated[
        Path, typer.Option(help="Configuration file, such as configs/demo_medusa.yaml.")
    ],
    init: Annotated[
        str | None,
        typer.Option(metavar="FAMILY", help="Write FILE for this family of heads, and end."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --init: the model to fit FILE to.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train draft heads on the hidden states of a frozen target.

    \b
    A first FILE:       drafthead train --init parallel --target MODEL --config FILE
    One process:        drafthead train --config FILE
    With accelerate:    accelerate launch train/train_heads.py --config FILE
    Two CPU processes:  accelerate launch --config_file configs/accelerate/cpu2.yaml
                        train/train_heads.py --config FILE
    Other settings:     ... --config FILE optimizer.lr=3e-4 train.max_minutes=10

    A file has the sections target, head, data, optimizer and train. Settings after it override it.
    The same command continues a stopped run, and does nothing when the run is finished.
    """
    if (init is None) != (target is None):
        raise UserError("--init FAMILY and --target MODEL go together: they write a first FILE")
    if init is not None and target is not None:
        write_starting_config(init, target, config)
        print(f"{config} is written: look at it, then drafthead train --config {config}")
        return
    is_main = int(os.environ.get("RANK", "0")) == 0
    logging.getLogger("drafthead").setLevel(logging.INFO if is_main else logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    # It would warn of the two names of tied weights at every save.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # of layers on disk
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # else one line per retry
    disable_progress_bar()
    if not train(load_run_config(config, settings or [])):
        print("stopped; the state is saved, the same command continues", file=sys.stderr)
        raise typer.Exit(130)


def fail(error: UserError) -> int:
    """Print one sentence and return the exit status."""
    # The launcher kills all processes once one has ended. The others wait, so that the main process
    # can print its error first, which mostly is the same.
    if int(os.environ.get("RANK", "0")) != 0:
        time.sleep(SECONDS_FOR_MAIN)
    print(f"drafthead: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(fail(error))
    except KeyboardInterrupt:
        sys.exit(130)
