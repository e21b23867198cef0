"""The parts of an architecture of transformers: decoder, layers, final norm, cache."""

import inspect
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError

AnyModule = TypeVar("AnyModule", bound=nn.Module)
# Where the architectures of transformers keep their decoder layers and their final norm.
LAYER_NAMES = ("layers", "h", "blocks", "block")
ENCODER_LAYERS = "layer"  # of what BERT and its kin call an encoder, also where it decodes
NORM_NAMES = (
    *("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f"),
    *("layer_norm", "layernorm", "final_norm"),
    "embedding_norm",  # LFM2, where it is the last one all the same
)
# How a `forward` calls the argument for keys and values: `cache` from transformers 5.24 on. The old
# name first: code from elsewhere still has it, and what takes both has something else in the other.
CACHE_NAMES = ("past_key_values", "cache")


def find_any(root: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The first attribute of `root` among `names` that is a module; None where none is."""
    found = (getattr(root, name, None) for name in names)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def find_module(root: nn.Module, names: Sequence[str], what: str) -> nn.Module:
    """The first attribute of `root` among `names`; raises UserError naming what is missing."""
    if (module := find_any(root, names)) is not None:
        return module
    raise UserError(
        f"{type(root).__name__} has no {what} under any of the names {', '.join(names)}: "
        "drafthead cannot read hidden states of this architecture"
    )


def without_wrapper(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside a PEFT wrapper; adapters within its layers keep working.

    Raises UserError for prompt tuning, which is not within the layers.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is None:
        return model
    if adapter.is_prompt_learning:
        raise UserError(
            f"a target with a {adapter.peft_type.value} adapter is not supported: it puts a "
            "learned prompt before the text, of which positions and masks know nothing"
        )
    return model.get_base_model()  # type: ignore[operator]  # PeftModel's method


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The stack of decoder layers of a causal language model, without its output head."""
    decoder = model.get_decoder()
    # For a few models that is the whole model or the output head.
    if any(hasattr(decoder, name) for name in LAYER_NAMES):
        return decoder
    return getattr(model, "model", decoder)


def find_layers(decoder: PreTrainedModel) -> nn.Module:
    """The decoder layers; raises UserError where there are none, or where each sees all tokens."""
    own = getattr(getattr(decoder, "encoder", None), ENCODER_LAYERS, None)
    if own is None or find_any(decoder, LAYER_NAMES):
        return find_module(decoder, LAYER_NAMES, "decoder layers")
    if not getattr(decoder.config, "is_decoder", True):
        raise UserError(
            f"{type(decoder).__name__} is not supported as a target: each token also sees those "
            "after it; where it was trained to decode, set is_decoder in its config.json"
        )
    return own


def can_skip_logits(model: PreTrainedModel, decoder: PreTrainedModel) -> bool:
    """Whether `logits_to_keep` limits the logits and nothing else, and may name no position."""
    takes = inspect.signature(type(model).forward).parameters.get("logits_to_keep")
    # Gemma 4 also passes it to its decoder, which then drops the other positions' hidden states.
    decoder_takes = inspect.signature(type(decoder).forward).parameters
    # Code from elsewhere may only take a number.
    takes_places = takes is not None and "Tensor" in str(takes.annotation)
    return takes_places and "logits_to_keep" not in decoder_takes


def cache_argument(function: Callable[..., object]) -> str:
    """The name of the argument for keys and values of a `forward`; empty where it takes none."""
    takes = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in takes), "")


def names_in(function: Any) -> set[str]:
    """The names that a function looks up."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else {*code.co_names}


def members(model: nn.Module) -> list[Any]:
    """The classes and functions that the module of a model's class defines."""
    names = vars(sys.modules[type(model).__module__])
    found = [each for each in names.values() if hasattr(each, "__name__")]
    return [each for each in found if getattr(each, "__module__", "") == names["__name__"]]


def words_of(kind: type) -> set[str]:
    """The names and texts in the code of a class's own methods."""
    found: set[str] = set()
    methods = [getattr(inspect.unwrap(each), "__code__", None) for each in vars(kind).values()]
    codes: list[Any] = [code for code in methods if code is not None]
    for code in codes:  # which grows by the functions within
        texts = [text for each in code.co_consts for text in (each, *as_tuple(each))]
        found |= {*code.co_names, *(text for text in texts if isinstance(text, str))}
        codes += [each for each in code.co_consts if hasattr(each, "co_code")]
    return found


def as_tuple(thing: Any) -> tuple[Any, ...]:
    """A tuple itself; an empty one for anything else."""
    return thing if isinstance(thing, tuple) else ()


def is_derived(config: PretrainedConfig, name: str) -> bool:
    """Whether a setting follows from others and cannot be set."""
    known = getattr(type(config), config.attribute_map.get(name, name), None)
    return isinstance(known, property) and known.fset is None


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Make a model's configuration that of some of its layers.

    Settings that list a value for each layer keep those of the chosen layers. Two end tokens of a
    model of two layers are no such setting.
    """
    count, given = config.num_hidden_layers, config.to_dict()
    if own := given.get("per_layer_config"):  # of layers that differ from the others, by number
        own = {int(layer): settings for layer, settings in own.items()}
        config.per_layer_config = {n: own[old] for n, old in enumerate(layers) if old in own}
    for name, value in given.items():
        if is_derived(config, name):
            continue
        if isinstance(value, list) and len(value) == count and not name.endswith("_token_id"):
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)


def with_own_children(module: AnyModule) -> AnyModule:
    """A copy whose submodules can be replaced; until then they are those of the original."""
    twin = copy(module)
    twin._modules = dict(module._modules)
    return twin
