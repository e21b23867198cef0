"""Types of a target's weights: their names, and how bitsandbytes keeps them."""

import importlib.util
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.modeling_utils import PreTrainedModel

from drafthead.heads.errors import UserError

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
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
LOSSY = (INT7, *BITSANDBYTES)  # all of them compute in bfloat16


def type_name(dtype: object) -> str:
    """The name of a type of weights: a torch type's, or a shorter name's for the same.

    Raises UserError for what is neither.
    """
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | torch.dtype):
        raise UserError(f"dtype must be the name of a type or a torch type, got {dtype!r}")
    return SHORT_NAMES.get(name, name)


def dtype_named(name: str) -> torch.dtype:
    """The torch type called `name`; raises UserError for a name that is not a floating type.

    Types that are LOSSY compute in bfloat16, which is returned for them.
    """
    dtype = torch.bfloat16 if name in LOSSY else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(
            f"unknown dtype {name!r}: use auto, float32, bfloat16, float16, {', '.join(LOSSY)}"
        )
    return dtype


def quantising_options(dtype: str, device: torch.device) -> dict[str, Any]:
    """What transformers' `from_pretrained` takes for a type of BITSANDBYTES; nothing for others.

    Raises UserError where bitsandbytes is not installed.
    """
    if dtype not in BITSANDBYTES:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"the type {dtype} needs bitsandbytes, which is not installed: pip install "
            "'drafthead[quantized]'"
        )
    config = BitsAndBytesConfig(**BITSANDBYTES[dtype])
    return {"quantization_config": config, "device_map": {"": device}}  # they may not be movable


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
