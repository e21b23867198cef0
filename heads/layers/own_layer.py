"""A decoder layer of the target's own class, as a layer of a draft: transformers computes it.

So a draft can have experts, latent attention, gates or windows, as the target has them.
"""

import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drafthead.core.errors import UserError, first_line
from drafthead.core.target.architecture import (
    LAYER_NAMES,
    cache_argument,
    find_module,
    is_derived,
    keep_layers,
)
from drafthead.core.target.masks import layer_kinds
from drafthead.heads.layers.decoder_layer import Rotation, Store

# Models with code of their own whose layers are those of another model, which transformers has.
LIKE = {"mimo": "qwen2"}
# Not of the layer: where the model came from, its code, how its weights are stored, a key of ours.
NOT_KEPT = (
    *("_name_or_path", "auto_map", "architectures", "dtype", "torch_dtype"),
    *("quantization_config", "drafthead_depth"),
)
NO_TOKENS = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def config_named(content: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of a language model from that of a checkpoint.

    Raises UserError for a model that transformers does not have.
    """
    name = str(content.get("model_type"))
    name = LIKE.get(name, name)
    if name not in CONFIG_MAPPING:
        raise UserError(
            f"transformers has no layers of the model type {name!r}: a newer version may have them"
        )
    found = CONFIG_MAPPING[name].from_dict({**content, "model_type": name})
    return found.get_text_config(decoder=True)


def mtp_layer_of(config: PretrainedConfig) -> dict[str, Any]:
    """The configuration, as JSON holds it, of a model of one layer: that of a model's MTP layer.

    What the model's own configuration does not say of that layer is as in its last one, but that
    it attends to all positions. Raises UserError for a model without layers that attend.
    """
    kept = deepcopy(config)
    if not layer_kinds(config, config.model_type, with_states=True):
        raise UserError(f"{config.model_type} has no MTP layer: none of its layers attends")
    if is_derived(config, "layer_types"):  # RecurrentGemma
        raise UserError(f"{config.model_type} has no MTP layer: kinds of its layers cannot be set")
    kinds = getattr(config, "mtp_layer_types", None) or ["full_attention"]
    keep_layers(kept, [config.num_hidden_layers - 1])
    if getattr(kept, "layer_types", None):
        kept.layer_types = list(kinds[:1])
    if kinds_of_mlp := getattr(config, "mtp_mlp_layer_types", None):
        kept.mlp_layer_types = list(kinds_of_mlp[:1])
    if hasattr(kept, "first_k_dense_replace"):  # it has experts, although it is the first layer
        kept.first_k_dense_replace = 0
    found = json.loads(kept.to_json_string(use_diff=True))
    found["model_type"] = LIKE.get(kept.model_type, kept.model_type)
    return {key: value for key, value in found.items() if key not in NOT_KEPT}


def model_of_one_layer(content: Mapping[str, Any]) -> PreTrainedModel:
    """A fresh model of one layer, without tokens, in float32, on the device of the context.

    Raises UserError for a model that transformers does not have, without rotary positions, or of
    which transformers builds no such part.
    """
    plain = {key: value for key, value in content.items() if key not in NOT_KEPT}
    try:
        config = config_named({**plain, **NO_TOKENS, "num_hidden_layers": 1})
        # Experts one after the other: their other forms take no mixed precision.
        config._experts_implementation = "eager"
        model: PreTrainedModel = AutoModel.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    except UserError:
        raise
    except Exception as error:  # a model that cannot have one layer, or no mask: many kinds
        reason = first_line(error)
        raise UserError(f"{content.get('model_type')} has no MTP layer: {reason}") from error
    rotations = getattr(config, "rope_parameters", None) or {}
    by_kind = any(isinstance(each, Mapping) for each in rotations.values())
    if not hasattr(model, "rotary_emb") or (by_kind and not rotations.get(config.layer_types[0])):
        raise UserError(f"{type(model).__name__} has no rotary positions, which MTP layers have")
    return model


class OwnRotary:
    """Rotary positions as a model of one layer has them.

    Not a module: casting a head to 16 bits must leave the frequencies in float32.
    """

    def __init__(self, model: PreTrainedModel):
        kind: Any = type(model.rotary_emb)
        with torch.device("cpu"):  # even where a head is laid out on `meta` before it is filled
            self.module = kind(config=model.config)
        takes = inspect.signature(kind.forward).parameters
        # Where kinds of layers rotate differently.
        self.options = {"layer_type": model.config.layer_types[0]} if "layer_type" in takes else {}

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Cosines and sines [B, T, rotated part of head_dim] of positions [B, T]."""
        self.module.to(positions.device)
        like = torch.zeros((), device=positions.device)
        cos, sin = self.module(like, positions, **self.options)
        return cos, sin


class OwnLayer(nn.Module):
    """The layer of a model of one, called as a `DecoderLayer` is."""

    def __init__(self, model: PreTrainedModel, rotary: OwnRotary):
        """Raises UserError for a layer that carries a state, which cannot branch."""
        super().__init__()
        layers: Any = find_module(model, LAYER_NAMES, "decoder layers")
        self.name = type(model).__name__
        if len(layers) != 1:
            raise UserError(f"{self.name} has no MTP layer: transformers builds {len(layers)}")
        self.layer = layers[0]
        self.rotary, self.width = rotary, int(model.config.hidden_size)
        (self.kind,) = layer_kinds(model.config, type(model).__name__)
        self.cache_name = cache_argument(type(self.layer).forward)

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Heads of what the layer keeps of a position, and the widths of a key and a value.

        As a pass over one position shows: latent attention keeps something else than keys. Raises
        UserError for a layer that needs more than its states and rotary positions.
        """
        weight, sizes = next(self.parameters()), []

        def look(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            sizes.append((keys.shape[1], keys.shape[3], values.shape[3]))
            return keys, values

        try:
            with torch.no_grad():
                rotation = self.rotary(torch.zeros(1, 1, dtype=torch.long, device=weight.device))
                sees = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=weight.device)
                self(weight.new_zeros(1, 1, self.width), rotation, sees, look)
            return sizes[0]
        except Exception as error:  # what a layer lacks shows itself in as many kinds of errors
            reason = first_line(error)
            raise UserError(f"{self.name} has no MTP layer that runs alone: {reason}") from error

    def forward(
        self,
        hidden: torch.Tensor,  # [B, T, D]
        rotation: Rotation,
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool, true where a query may look
        store: Store,
    ) -> torch.Tensor:
        """Maps [B, T, D] to [B, T, D]; see `SelfAttention.forward`."""
        mask = self.kind.within_reach(mask)
        cos, sin = (table.to(hidden.dtype) for table in rotation)
        # Of a cache, attention of transformers calls this alone.
        cache = SimpleNamespace(update=lambda keys, values, *_, **__: store(keys, values))
        options = {"position_embeddings": (cos, sin), self.cache_name: cache}
        output = self.layer(hidden, attention_mask=mask, **options)
        return output[0] if isinstance(output, tuple) else output
