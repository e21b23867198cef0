"""Entry point of training: `accelerate launch train/train_heads.py --config FILE`."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from accelerate.utils import set_seed
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers.utils.logging import disable_progress_bar

from drafthead.heads.errors import UserError
from drafthead.train.building import build_accelerator, build_head
from drafthead.train.features import load_target
from drafthead.train.loop import Trainer, TrainingTask
from drafthead.train.packing import load_packed
from drafthead.train.run_config import RunConfig, load_run_config

logger = logging.getLogger(__name__)

SECONDS_FOR_MAIN = 15


def train(config: RunConfig) -> bool:
    """Train a head as configured; False when it was interrupted and can be continued."""
    accelerator = build_accelerator(config)
    folder = config.folder()
    if folder.status(config.train.overwrite) == "finished":
        logger.info("%s holds this very run, finished: nothing to do", folder.path)
        return True
    set_seed(config.train.seed)
    data, precision = config.data, config.train.mixed_precision
    target = load_target(config.target, precision, data.max_length, accelerator.device)
    tokenizer = target.tokenizer
    assert tokenizer is not None  # a target read from disk has one
    rows = load_packed(data.train, tokenizer, data, config.train.seed)
    head = build_head(config.family, config.head, target, rows.token_counts(target.vocab_size))
    held_out = None
    if data.validation is not None:
        held_out = load_packed(data.validation, tokenizer, data, 0, data.max_validation)
    task = TrainingTask(target, config.target.name, head, rows, held_out)
    with logging_redirect_tqdm():
        finished = Trainer(accelerator, task, config.train, config.optimizer, folder).fit()
    accelerator.end_training()
    return finished


def main(
    config: Annotated[Path, typer.Option(help="The run, such as configs/demo_medusa.yaml.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Train draft heads on the hidden states of a frozen target.

    \b
    One process:        drafthead train --config configs/demo_medusa.yaml
    As accelerate says: accelerate launch train/train_heads.py --config FILE
    Two CPU processes:  accelerate launch --config_file configs/accelerate/cpu2.yaml
                        train/train_heads.py --config FILE
    Other settings:     ... --config FILE optimizer.lr=3e-4 train.max_minutes=10

    A file has the sections target, head, data, optimizer and train. Settings behind it win over it.
    The same command continues a run that was stopped, and does nothing when it is finished.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    logging.getLogger("drafthead").setLevel(logging.INFO if first else logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line a retry otherwise
    disable_progress_bar()
    if not train(load_run_config(config, settings or [])):
        print("stopped; the state is saved, the same command continues", file=sys.stderr)
        raise typer.Exit(130)


def fail(error: UserError) -> int:
    """Print one sentence and return the exit status.

    The launcher kills all processes once one has ended, so the others leave the first word to the
    main process, which mostly has the same to say.
    """
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
