"""A smaller language model that is made of some of a target's layers."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from drafthead.heads.errors import UserError
from drafthead.heads.target.architecture import LAYER_NAMES, find_decoder
from drafthead.heads.target.part import keep_layers
from drafthead.heads.target.placement import whole_weight
from drafthead.heads.target.target import Target

# The target's layers for each layer of a draft model, where nothing else is asked for.
LAYERS_FOR_ONE = 8


def evenly_spaced(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of a target's layers, the first and the last among them.

    4 of 30 layers are 0, 10, 19 and 29; one layer is the first.
    """
    steps = max(1, count - 1)
    return tuple(round(place * (num_layers - 1) / steps) for place in range(count))


def architecture_of(target: Target, layers: Sequence[int]) -> dict[str, Any]:
    """transformers' configuration of a model of the given layers of a target.

    Settings that list a value for each layer keep those of the chosen layers. Raises UserError for
    layers that the target lacks, or that are none.
    """
    outside = [layer for layer in layers if not 0 <= layer < target.num_layers]
    if outside or not layers:
        raise UserError(
            f"head.layers is {list(layers)}, but the target has layers 0 to {target.num_layers - 1}"
        )
    config = deepcopy(target.config)
    keep_layers(config, layers)
    return {"model_type": config.model_type, **config.to_dict()}


def built(architecture: dict[str, Any]) -> PreTrainedModel:
    """A model with random weights, in float32, of a configuration of `architecture_of`."""
    config = AutoConfig.for_model(**architecture)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def copy_layers(target: Target, layers: Sequence[int], model: PreTrainedModel) -> None:
    """Give a model of `built` the weights of the target: the chosen layers and all around them.

    Raises UserError for a target whose weights are not plain matrices.
    """
    draft, source = find_decoder(model).state_dict(), find_decoder(target.model)
    weights: dict[str, torch.Tensor] = {}
    name_of = {str(layer): str(place) for place, layer in enumerate(layers)}
    for name, tensor in source.state_dict().items():
        first, _, rest = name.partition(".")
        layer, _, inner = rest.partition(".")
        if first not in LAYER_NAMES:
            weights[name] = tensor
        elif layer in name_of:
            weight = whole_weight(source, name, tensor)
            weights[f"{first}.{name_of[layer]}.{inner}"] = weight
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if shapes != {name: tensor.shape for name, tensor in draft.items()}:
        raise UserError(
            "a draft model cannot be cut out of this target: its weights are quantised, or have "
            "adapters that are not merged"
        )
    find_decoder(model).load_state_dict(weights)
    model.get_output_embeddings().load_state_dict(target.output_head.state_dict())
