"""MTP: layers that models bring along to draft with (DeepSeek-AI, 2024, arXiv 2412.19437).

A layer of the target's own class reads the embedding of the next token and the target's final
hidden state, each after a norm, side by side. Its output, after one more norm, goes to the target's
output head, and stands for the hidden state of the next position.
"""

from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import nn

from drafthead.core.settings import settings
from drafthead.core.target.architecture import NORM_NAMES, find_module
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.heads.base import ForTraining, register_head
from drafthead.heads.families.recurrent.head import RecurrentConfig, RecurrentHead
from drafthead.heads.layers.decoder_layer import LayerConfig, Rotation, StoreOf
from drafthead.heads.layers.own_layer import OwnLayer, OwnRotary, model_of_one_layer, mtp_layer_of


@settings
class MtpConfig(RecurrentConfig):
    """The shape of an MTP layer; its sizes are in `layer`, not beside it as of other heads."""

    depth: int = 3
    ttt_steps: ForTraining[int] = 3  # the one layer serves all depths (FastMTP, arXiv 2509.18362)
    layer: dict[str, Any] | None = None  # of a model of this one layer; None: from the target

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {field.name for field in fields(LayerConfig)} - {"hidden_size"} | {"num_layers"}
        if beside := [n for n in sorted(sizes) if getattr(self, n) != getattr(MtpConfig, n)]:
            raise ValueError(f"{beside[0]} is of the target's own layer here: leave it out")

    def like(self, target: Target) -> Self:
        """This configuration with a layer of the target's class, unless it has one."""
        return self if self.layer else replace(self, layer=mtp_layer_of(target.config))


@register_head("mtp", MtpConfig)
class MtpHead(RecurrentHead):
    """An MTP layer; it guesses all depths, each from its own output at the depth before."""

    embed_tokens = None

    def __init__(self, config: MtpConfig):
        """Raises UserError for a layer that transformers does not have, or that cannot branch."""
        assert config.layer is not None
        model = model_of_one_layer(config.layer)
        rotary = OwnRotary(model)
        super().__init__(config, rotary=rotary)
        norm = find_module(model, NORM_NAMES, "final norm")
        self.enorm, self.hnorm, self.norm = (deepcopy(norm) for _ in range(3))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([OwnLayer(model, rotary)])

    def initialize(self, target: Target) -> None:
        """Nothing: a fresh layer begins as those of its model do before any training."""

    def encode(self, features: Features) -> torch.Tensor:
        """The final features [B, T, D]."""
        assert features.last is not None
        return features.last

    def layer_inputs(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One vector [B, T, D] of normed embeddings and states [B, T, D]."""
        return (self.fc(torch.cat([self.enorm(embeds), self.hnorm(states)], dim=-1)),)

    def run_layers(
        self,
        embeds: torch.Tensor,  # [B, T, D]
        states: torch.Tensor,  # [B, T, D]
        rotation: Rotation,
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool
        store_of: StoreOf,
    ) -> torch.Tensor:
        return self.norm(super().run_layers(embeds, states, rotation, mask, store_of))

    def logits(self, outputs: torch.Tensor, target: Target) -> torch.Tensor:
        """The target's logits [..., V] of outputs [..., D]."""
        return target.project(outputs)
