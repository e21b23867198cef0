"""The class of target for a model: with an encoder or without."""

from pathlib import Path

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.contrib.encoder_decoder.encoder_decoder import EncoderDecoderTarget
from drafthead.heads.target.architecture import without_wrapper
from drafthead.heads.target.gguf_files import model_folder
from drafthead.heads.target.loading import has_encoder
from drafthead.heads.target.target import Target


def load_target(
    name: str | Path, dtype: str = "auto", device: str = "auto", trust_code: bool = False
) -> Target:
    """`Target.from_pretrained` for models with an encoder as well."""
    source = model_folder(name)
    kind = EncoderDecoderTarget if has_encoder(source, trust_code) else Target
    return kind.from_source(source, name, dtype, device, trust_code)


def target_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
    """A loaded model as a target; raises UserError where the constructor of its class does."""
    with_encoder = without_wrapper(model).config.is_encoder_decoder
    return (EncoderDecoderTarget if with_encoder else Target)(model, tokenizer)
