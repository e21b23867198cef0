"""The first configuration for a target: a family's file in `configs/`, fitted to the model."""

import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.files import write_text
from drafthead.core.storage.names import refuse_missing_model
from drafthead.core.target.gguf_files import model_folder
from drafthead.core.target.target import Target
from drafthead.train.run.config import load_run_config
from drafthead.train.run.trainables import trainable

PRESETS = {"eagle3-portable": "eagle3"}  # further files in `configs/`, and their families
WIDE = 1024  # hidden size from which a target counts as large
# For small targets and for large ones.
DRAFT_VOCABULARY, ROW_LENGTH = (8192, 32768), (512, 2048)


def write_starting_config(family: str | None, target: str | None, path: Path) -> None:
    """Write the configuration to train a head of `family`, or of a preset, for `target`.

    Raises UserError when one of the two is missing, the file exists, the family does not, or the
    target's sizes cannot be read.
    """
    if family is None or target is None:
        raise UserError("--init FAMILY and --target MODEL go together: they write a first FILE")
    trainable(PRESETS.get(family, family))
    if path.exists():
        raise UserError(f"{path} exists already: give --config another name for the new file")
    template = files("drafthead.configs").joinpath(f"{family}.yaml")
    if not template.is_file():
        raise UserError(
            f"{family} comes from a plugin, without a first file: write one for another family, "
            f"give it head.family: {family}, and see drafthead train --settings {family}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, fitted(template.read_text(encoding="utf-8"), target, target_sizes(target)))
    load_run_config(path)


def target_sizes(target: str) -> Any:
    """The configuration of the target's decoder; UserError when it cannot be read, or when the
    target has an encoder.
    """
    source = model_folder(target)
    refuse_missing_model(str(source))
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise UserError(f"cannot read the sizes of {target}: {reason}") from error
    Target.check_kind(target, config.is_encoder_decoder)
    return config.get_text_config(decoder=True)


def fitted(template: str, target: str, sizes: Any) -> str:
    """A family's file with the target's name, and with what depends on its sizes.

    Of the comment at its top only the first line is kept.
    """
    large = int(sizes.hidden_size >= WIDE)
    context = getattr(sizes, "max_position_embeddings", None) or ROW_LENGTH[large]
    vocabulary = DRAFT_VOCABULARY[large]
    values = {
        "name": target,
        "init_from": target,  # of a layer that the target itself has
        "max_length": min(ROW_LENGTH[large], context),
        # A vocabulary that is hardly larger is guessed whole.
        "draft_vocab_size": vocabulary if 2 * vocabulary <= sizes.vocab_size else 0,
    }
    title, _, text = template.partition("\n")
    text = text[text.index("target:") :]
    for key, value in values.items():
        text = with_value(text, key, value)
    return f"{title}\n{text}"


def with_value(text: str, key: str, value: object) -> str:
    """YAML in which the first setting `key`, if there is one, has another value.

    Other settings and comments stay: with the value 2 for a, "  a: 1 # so" becomes "  a: 2 # so".
    """
    written = yaml.safe_dump(value, width=math.inf).splitlines()[0]  # a name may need quotes
    setting = re.compile(rf"^( +{key}: )[^ #\n]+", re.MULTILINE)
    return setting.sub(lambda match: f"{match[1]}{written}", text, count=1)
