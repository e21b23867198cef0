"""Types of a target's weights: their names, and how bitsandbytes keeps them."""

from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

INT7 = "int7"  # the type of targets whose matrices are rounded, see `heads.target.seven_bits`
# Types whose matrices bitsandbytes keeps in so few bits, all but the output head's.
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "int4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
}
LOSSY = (INT7, *BITSANDBYTES)  # all of them compute in bfloat16


def quantisation_of(model: PreTrainedModel) -> str | None:
    """How the weights of a model are quantised: a type of BITSANDBYTES, another method, or None."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    settings = config if isinstance(config, dict) else config.to_dict()
    for name, options in BITSANDBYTES.items():
        if settings.get(next(iter(options))):
            return name
    method = settings["quant_method"]
    return str(getattr(method, "value", method))
