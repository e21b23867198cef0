"""The target that a name stands for, with an encoder or without, or its tokenizer alone."""

from pathlib import Path

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError, first_line
from drafthead.core.registry import Registry
from drafthead.core.storage.names import refuse_missing_model
from drafthead.core.target.architecture import without_wrapper
from drafthead.core.target.gguf_files import gguf_of, model_folder
from drafthead.core.target.loading import (
    has_encoder,
    load_model,
    tokenizer_in,
)
from drafthead.core.target.placement import WHOLE, Placement
from drafthead.core.target.target import Target

ENCODER_DECODER = "encoder-decoder"
# Kinds of model that need another class than `Target`.
TARGETS: Registry[type[Target]] = Registry("drafthead.targets")


def target_class(with_encoder: bool) -> type[Target]:
    """The class of target for models with an encoder, or without."""
    return TARGETS[ENCODER_DECODER] if with_encoder else Target


def load_target(
    name: str | Path, dtype: str = "auto", device: str = "auto", trust_code: bool = False
) -> Target:
    """`load_decoder_only` for models with an encoder as well."""
    source = model_folder(name)
    kind = target_class(has_encoder(source, trust_code))
    return kind(*load_model(source, name, dtype, device, trust_code, WHOLE))


def load_decoder_only(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    trust_code: bool = False,
    placement: Placement = WHOLE,
) -> Target:
    """Load a model, or a PEFT adapter with its base model, from a folder, GGUF file or hub id.

    `dtype` is `auto` (as stored; a GGUF file on a CPU in its blocks), `float32`, `bfloat16`,
    `float16`, or a lossy one, which is another model: `int8` or `int4` (on a CPU by `int8.py` and
    in blocks, else by bitsandbytes).
    `device` is `auto` (a GPU if there is one) or a torch device, of the inputs and of all that
    `placement` does not put elsewhere. Raises UserError naming what could not be loaded or placed,
    and for a model with an encoder.
    """
    source = model_folder(name)
    Target.check_kind(str(name), has_encoder(source, trust_code))
    return Target(*load_model(source, name, dtype, device, trust_code, placement))


def whole_folder(name: str | Path, folder: Path) -> str | Path:
    """The place where other software finds a model's weights: its name, or for a GGUF file a copy
    in bfloat16, which is written into a folder.
    """
    if gguf_of(name) is None:
        return name
    target = load_decoder_only(name, "bfloat16", "cpu")
    target.model.save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    return folder


def target_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
    """A loaded model as a target; raises UserError where the constructor of its class does."""
    return target_class(without_wrapper(model).config.is_encoder_decoder)(model, tokenizer)


def tokenizer_named(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, GGUF file or hub id; UserError if there is none."""
    folder = model_folder(name)
    refuse_missing_model(str(folder))
    try:
        return tokenizer_in(folder)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"no tokenizer can be loaded from {name} ({reason})") from error
