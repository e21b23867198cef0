"""Loading a target's model and tokenizer by name, in a type, onto a device."""

import hashlib
import importlib.util
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.backend import kernel_of
from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.mapped_files import give_back
from drafthead.core.storage.names import is_in_cache, refuse_missing_model
from drafthead.core.target import group_files
from drafthead.core.target.adapters import add_adapter, base_of_adapter
from drafthead.core.target.gguf_files import ACCOUNT_FILE, description_of, gguf_of
from drafthead.core.target.placement import Placement
from drafthead.core.target.rounding import to_int4, to_int8
from drafthead.core.target.weight_types import (
    BITSANDBYTES,
    INT4,
    INT8,
    LOSSY,
    quantisation_of,
    read_scales,
    wrongly_read,
)

SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
TOKENIZER_FILES = ("*token*", "*vocab*", "merges.txt", "*.model", "*.tiktoken")

logger = logging.getLogger(__name__)


def load_tokenizer(
    name: str | Path, base_name: str, trust_code: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer stored with a model, or for an adapter without one, its base model's.

    None for a folder without tokenizer files: its model takes token ids.
    """
    try:
        return tokenizer_in(name, trust_code)
    except (OSError, ValueError):
        if base_name == str(name):
            folder = Path(name)
            if folder.is_dir() and not any(any(folder.glob(p)) for p in TOKENIZER_FILES):
                return None
            raise
        return load_tokenizer(base_name, base_name, trust_code)


def tokenizer_in(name: str | Path, trust_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id; OSError or ValueError where there is none."""
    # The class of a GGUF file's model would build it once more from its words, in seconds.
    kind = PreTrainedTokenizerFast if (Path(name) / ACCOUNT_FILE).exists() else AutoTokenizer
    return kind.from_pretrained(name, trust_remote_code=trust_code)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of which token each id stands for, added tokens included."""
    return _vocabulary_of(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """`vocabulary_of`, kept: tokens can only be added to a tokenizer, so its size tells."""
    digest = hashlib.blake2b(digest_size=8)
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}\t{token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def is_on(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether a model's weights are on a device; `cuda` means any GPU."""
    return model.device.type == device.type and device.index in (None, model.device.index)


def configuration_of(source: str | Path, trust_code: bool) -> PretrainedConfig | None:
    """The configuration of a folder or hub id; None where there is none, as of an adapter.

    Raises UserError for a folder that does not exist, and for a name that the hub would have to
    bring where it cannot be reached.
    """
    refuse_missing_model(str(source))
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_code)
    except Exception as error:  # transformers raises many kinds; loading the model tells which
        away = isinstance(error.__cause__, LocalEntryNotFoundError)
        if away and not is_in_cache(str(source), "adapter_config.json"):
            raise UserError(
                f"cannot load the model {source}: there is no such folder here, and the hub cannot "
                "be reached"
            ) from error
        return None


def has_encoder(source: str | Path, trust_code: bool) -> bool:
    """Whether the model of a folder or hub id is an encoder-decoder model.

    An adapter counts as one for a decoder-only model. Raises as `configuration_of`.
    """
    config = configuration_of(source, trust_code)
    return config is not None and bool(config.is_encoder_decoder)


def decoder_class(config: PretrainedConfig | None) -> Any:
    """The class of transformers that loads a decoder-only model.

    Most models of images and texts are no causal language models to transformers. They are used
    for text alone.
    """
    texts, both = AutoModelForCausalLM, AutoModelForImageTextToText
    kind = type(config)
    return both if kind in both._model_mapping and kind not in texts._model_mapping else texts


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


def is_ours(dtype: str, device: torch.device) -> bool:
    """Whether a type on a device is one of whole numbers that needs no bitsandbytes."""
    return dtype in LOSSY and device.type == "cpu"


def round_products(
    model: PreTrainedModel, name: str | Path, dtype: str, device: torch.device
) -> None:
    """Make the products of a model those of whole numbers, where `dtype` asks for these here.

    Raises UserError where that cannot be, or its weights are stored in whole numbers already.
    """
    if not is_ours(dtype, device):
        return
    if kept := quantisation_of(model):
        raise UserError(f"the weights of {name} are stored in {kept}: leave out dtype={dtype}")
    {INT8: to_int8, INT4: to_int4}[dtype](model)


def quantising_options(dtype: str, device: torch.device) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a type of BITSANDBYTES; none for others.

    Raises UserError where bitsandbytes is not installed.
    """
    if dtype not in BITSANDBYTES or is_ours(dtype, device):
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"the type {dtype} needs bitsandbytes, which is not installed: pip install "
            "'drafthead[quantized]'"
        )
    config = BitsAndBytesConfig(**BITSANDBYTES[dtype])
    return {"quantization_config": config, "device_map": {"": device}}  # they may not be movable


def device_named(name: str) -> torch.device:
    """The torch device called `name`; `auto` is a GPU if there is one.

    Raises UserError for an unknown device, or for CUDA where there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but this machine has no usable CUDA GPU")
    return device


def model_class(config: PretrainedConfig | None) -> Any:
    """The class of transformers that loads a model of this configuration."""
    encodes = config is not None and config.is_encoder_decoder
    return AutoModelForSeq2SeqLM if encodes else decoder_class(config)


def model_of_files(
    source: str | Path,
    name: str | Path,
    dtype: str,
    device: torch.device,
    trust_code: bool,
    placement: Placement,
) -> PreTrainedModel:
    """The model of a folder or hub id; UserError, naming it, for weights that are read wrongly."""
    config = configuration_of(source, trust_code)
    kind, torch_dtype = model_class(config), dtype if dtype == "auto" else dtype_named(dtype)
    options = quantising_options(dtype, device) or placement.loading_options(
        kind, source, torch_dtype, device, trust_code
    )
    if config is not None and group_files.settings_of(config) and not options:
        return group_files.load(source, kind, config, type_of_blocks(dtype, device), trust_code)
    if method := read_scales(config):
        logger.info("%s: its weights, of the method %s, are read as 16-bit ones", name, method)
        options["config"] = config
    model, info = kind.from_pretrained(
        source, dtype=torch_dtype, trust_remote_code=trust_code, output_loading_info=True, **options
    )
    if reason := wrongly_read(model, info["unexpected_keys"], info["missing_keys"]):
        raise UserError(f"cannot load the model {name}: {reason}")
    return model


def type_of_blocks(dtype: str, device: torch.device) -> torch.dtype | None:
    """The type in which weights of 4 to 8 bits are read; None where they stay in their blocks.

    That is where our kernels multiply these: without them a pass takes several times as long as
    one in bfloat16.
    """
    if dtype != "auto":
        return dtype_named(dtype)
    return None if device.type == "cpu" and kernel_of("in_blocks") else torch.bfloat16


def model_of_gguf(
    file: Path, dtype: str, device: torch.device, placement: Placement
) -> PreTrainedModel:
    """The model of a GGUF file: on a CPU as it lies, unless another type is asked for.

    Raises UserError for layers on several devices, and for types of bitsandbytes.
    """
    from drafthead.core.target import gguf_model  # of no use to other targets

    if not placement.is_whole:
        raise UserError(f"{file} is a GGUF file, whose layers cannot be placed: use a folder")
    if dtype in BITSANDBYTES and not is_ours(dtype, device):
        raise UserError(f"{file} is a GGUF file: its blocks are not read by bitsandbytes ({dtype})")
    return gguf_model.load(file, description_of(file), type_of_blocks(dtype, device))


def load_model(
    source: str | Path,
    name: str | Path,
    dtype: str,
    device: str,
    trust_code: bool,
    placement: Placement,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model and the tokenizer of a folder or hub id, or of an adapter with its base model.

    The arguments are those of `any_target.load_decoder_only`.
    Raises UserError, with `name`, for what could not be loaded or placed.
    """
    dtype, torch_device = type_name(dtype), device_named(device)
    if dtype != "auto":
        dtype_named(dtype)
    if dtype in LOSSY and not placement.is_whole:
        raise UserError(f"the layers of a target of the type {dtype} cannot be placed")
    base = base_of_adapter(source)
    try:
        if (file := gguf_of(name)) is not None:
            model = model_of_gguf(file, dtype, torch_device, placement)
        else:
            of = base or source
            model = model_of_files(of, name, dtype, torch_device, trust_code, placement)
        if base is not None:
            add_adapter(model, source)
        tokenizer = load_tokenizer(source, model.name_or_path or str(source), trust_code)
        give_back()
        # Quantised weights may not be movable.
        if placement.is_whole and not is_on(model, torch_device):
            model.to(torch_device)  # type: ignore[arg-type]  # transformers wraps it
        round_products(model, name, dtype, torch_device)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds for a bad folder
        raise UserError(f"cannot load the model {name}: {first_line(error)}") from error
    if quantisation_of(model) in BITSANDBYTES:  # it would warn of a cast in every product
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return model.eval().requires_grad_(False), tokenizer  # nobody else has it to train
