"""What a name stands for: a target, with an encoder or without, or its tokenizer alone."""

from pathlib import Path

from transformers import AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.registry import Registry
from drafthead.heads.target.architecture import without_wrapper
from drafthead.heads.target.gguf_files import model_folder
from drafthead.heads.target.loading import has_encoder
from drafthead.heads.target.target import Target

ENCODER_DECODER = "encoder-decoder"
# Kinds of model that need another class than `Target`.
TARGETS: Registry[type[Target]] = Registry(
    {ENCODER_DECODER: "drafthead.contrib.encoder_decoder.encoder_decoder"}
)


def target_class(with_encoder: bool) -> type[Target]:
    """The class of target for models with an encoder, or without."""
    return TARGETS[ENCODER_DECODER] if with_encoder else Target


def load_target(
    name: str | Path, dtype: str = "auto", device: str = "auto", trust_code: bool = False
) -> Target:
    """`Target.from_pretrained` for models with an encoder as well."""
    source = model_folder(name)
    kind = target_class(has_encoder(source, trust_code))
    return kind.from_source(source, name, dtype, device, trust_code)


def target_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
    """A loaded model as a target; raises UserError where the constructor of its class does."""
    return target_class(without_wrapper(model).config.is_encoder_decoder)(model, tokenizer)


def tokenizer_named(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, GGUF file or hub id; UserError if there is none."""
    folder = model_folder(name)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer can be loaded from {name} ({reason})") from error
