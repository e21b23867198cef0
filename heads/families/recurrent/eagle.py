"""EAGLE (Li et al., 2024, arXiv 2401.15077): one decoder layer that continues target features.

From the target's final hidden state at position t and the token after it, the layer predicts the
hidden state at t + 1, which the target's own output head turns into the guess of token t + 2.
"""

from typing import Literal

import torch
from torch import nn

from drafthead.core.settings import settings
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.heads.base import ForTraining, register_head
from drafthead.heads.families.recurrent.head import RecurrentConfig, RecurrentHead
from drafthead.heads.layers.decoder_layer import DecoderLayer
from drafthead.heads.objectives.losses import feature_loss


@settings
class EagleConfig(RecurrentConfig):
    """Shape and loss of an EAGLE head.

    The original learns one step (`ttt_steps` 1); more are HASS's alignment (arXiv 2408.15766).
    """

    ttt_steps: ForTraining[int] = 1
    fc_bias: bool = True
    embeddings: Literal["target", "own"] = "target"  # own: read, not trained
    feature_weight: ForTraining[float] = 1.0  # of the distance from the target's hidden state
    token_weight: ForTraining[float] = 0.1  # of the token loss
    feature_noise: ForTraining[float] = 0.0  # uniform, from -x to x, added to the features read


@register_head("eagle", EagleConfig)
class EagleHead(RecurrentHead):
    """EAGLE's head; with dynamic trees it is EAGLE-2's."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.embed_tokens = None
        if config.embeddings == "own":
            self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        # The first layer has no norm of its input: it reads `fc`'s output as it is, as in EAGLE.
        self.layers = nn.ModuleList(
            DecoderLayer(config, input_norm=index > 0) for index in range(config.num_layers)
        )

    def initialize(self, target: Target) -> None:
        self.copy_embeddings(target)

    def encode(self, features: Features) -> torch.Tensor:
        """The final features [B, T, D], in training with noise."""
        assert features.last is not None
        noise = self.config.feature_noise if self.training else 0
        if noise == 0:
            return features.last
        return features.last + noise * (2 * torch.rand_like(features.last) - 1)

    def layer_inputs(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One vector [B, T, D] of embeddings and states [B, T, D]."""
        return (self.fc(torch.cat([embeds, states], dim=-1)),)

    def logits(self, outputs: torch.Tensor, target: Target) -> torch.Tensor:
        """The target's logits [..., V] of outputs [..., D]."""
        return target.project(outputs)

    def training_losses(
        self,
        states: torch.Tensor,  # [L, D]
        teacher: torch.Tensor,  # [L, D]
        token_losses: torch.Tensor,  # [L]
    ) -> torch.Tensor:
        """The distance from the target's states and the token loss, weighted, [L]."""
        distance = feature_loss(states, teacher)
        return self.config.feature_weight * distance + self.config.token_weight * token_losses
