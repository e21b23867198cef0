"""Types of a target's weights: their names, and how checkpoints and bitsandbytes keep them."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.target.scaled_weights import METHODS, NOT_NEEDED, OURS, declared

# On a CPU products of our own, see `int8` and `block_modules`.
INT8, INT4 = "int8", "int4"
# Types whose matrices bitsandbytes keeps in so few bits, all but the output head's.
BITSANDBYTES: dict[str, dict[str, Any]] = {
    INT8: {"load_in_8bit": True},
    INT4: {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
}
LOSSY = tuple(BITSANDBYTES)  # their hidden states are in bfloat16


def quantisation_of(model: PreTrainedModel) -> str | None:
    """The quantisation of a model's weights: a type of BITSANDBYTES, another method, or None."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    settings = config if isinstance(config, dict) else config.to_dict()
    for name, options in BITSANDBYTES.items():
        if settings.get(next(iter(options))):
            return name
    return method_of(settings)


def method_of(settings: dict[str, Any]) -> str:
    """The method of a configuration of quantised weights."""
    method = settings.get("quant_method", "an unknown method")
    return str(getattr(method, "value", method))


def read_scales(config: PretrainedConfig | None) -> str | None:
    """Let the weights of a checkpoint with this configuration be read as `scaled_weights` does,
    where they are of such a method: that method, else None.

    Raises ValueError for what its configuration declares and is not known.
    """
    if config is None:
        return None
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if isinstance(settings, dict) and method_of(settings) in METHODS:
            del part.quantization_config
            config.quantization_config = {"quant_method": OURS, "what": declared(settings)}
            return method_of(settings)
    return None


def wrongly_read(
    model: PreTrainedModel, unread: Iterable[str], missing: Iterable[str]
) -> str | None:
    """The reason that a loaded model has not its files' weights; None where none is known.

    `unread` are names of tensors of the files. The ones of modules that the model has, such as the
    scales of a matrix, would change what it computes, all but those of activations, which are not
    rounded. `missing` are weights that no file has.
    """
    config = model.config
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and getattr(model, "hf_quantizer", None) is None:
        return f"transformers cannot read weights of the method {method_of(settings)}"
    weighed = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    unread = (name for name in unread if name.rpartition(".")[2] not in NOT_NEEDED)
    lost = sorted(name for name in unread if name.rpartition(".")[0] in weighed)
    if lost:
        return f"its files have {lost[0]}, which {type(model).__name__} does not use"
    lacking = sorted(missing)
    return f"its files lack {', '.join(lacking[:3])}" if lacking else None
