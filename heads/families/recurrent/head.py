"""Draft heads that guess one token after the other: what the EAGLE family has in common.

At position t a small transformer reads a state and the embedding of token t + 1; its output
predicts token t + 2. The state is the target's feature where the target has run, and the head's own
last output beyond that.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from drafthead.core.settings import Count, FromZero, settings
from drafthead.core.target.features import Features
from drafthead.core.target.masks import LayerKind
from drafthead.core.target.target import Target
from drafthead.heads.base import ForTraining
from drafthead.heads.families.by_depth import HeadByDepth
from drafthead.heads.layers.decoder_layer import LayerConfig, Rotary, Rotation, Store, StoreOf
from drafthead.heads.layers.segments import seen_in_segments
from drafthead.heads.objectives.anchors import is_anchor
from drafthead.heads.objectives.batch import HeadBatch, HeadLoss
from drafthead.heads.objectives.losses import (
    DepthDecay,
    LossName,
    depth_weights,
)


@settings
class RecurrentConfig(LayerConfig):
    """Layers and training of a recurrent head. Sizes are filled in from the target."""

    vocab_size: int = 0
    num_layers: Count = 1
    depth: Count = 5  # tokens drafted after the root
    ttt_steps: ForTraining[Count] = 5  # training-time test: steps that training unrolls, 1 for none
    depth_decay: ForTraining[DepthDecay] = 0.8  # step k's loss weighs depth_decay ** (k - 1)
    loss: ForTraining[LossName] = "soft"  # a name in heads.objectives.losses.TOKEN_LOSSES
    window: FromZero = 0  # positions that layers see, their own and those before it; 0: all

    def __post_init__(self) -> None:
        if self.ttt_steps > self.depth:
            raise ValueError(
                f"ttt_steps must lie in 1 to depth ({self.depth}), got {self.ttt_steps}"
            )


class RecurrentHead(HeadByDepth):
    """A head that drafts by feeding back its own outputs."""

    layers: nn.ModuleList
    embed_tokens: nn.Embedding | None  # the head's own, if it has any
    # Outputs and logits of a pass by a kernel, of a head that runs ours; see `RecurrentPasses`.
    in_one_call: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None

    def __init__(
        self,
        config: RecurrentConfig,
        draft_vocab_size: int = 0,
        rotary: Callable[[torch.Tensor], Rotation] | None = None,
    ):
        """`draft_vocab_size` is the number of tokens that the head can guess, 0 for all; `rotary`
        gives positions [B, T] to the layers, by default as the configuration says.
        """
        super().__init__(config, draft_vocab_size)
        self.rotary = rotary or Rotary.of(config)

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        return super().sized(config, target).like(target)

    @property
    def depth(self) -> int:
        """Return the configured depth: it could draft further, with ever worse guesses."""
        return int(self.config.depth)

    @abstractmethod
    def encode(self, features: Features) -> torch.Tensor:
        """The states [B, T, D] of positions where the target has run."""

    def copy_embeddings(self, target: Target) -> None:
        """Fill the head's own embeddings, if it has any, with the target's."""
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(target.input_weight())

    def embed(self, token_ids: torch.Tensor, target: Target) -> torch.Tensor:
        """Embeddings [..., D] of tokens [...]: the target's, or the head's own."""
        own = self.embed_tokens
        return target.embed(token_ids) if own is None else own(token_ids)

    def layer_inputs(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inputs [B, T, D] of the first layer: embeddings and states, side by side."""
        return embeds, states

    def run_layers(
        self,
        embeds: torch.Tensor,  # [B, T, D] of the token after each position
        states: torch.Tensor,  # [B, T, D]
        rotation: Rotation,
        mask: torch.Tensor,  # [B or 1, 1, T, S] bool
        store_of: StoreOf,
    ) -> torch.Tensor:
        """The outputs [B, T, D]; `store_of(index)` takes the keys and values of a layer."""
        if self.config.window:
            mask = LayerKind("sliding_attention", self.config.window).within_reach(mask)
        inputs = self.layer_inputs(embeds, states)
        for index, layer in enumerate(self.layers):
            inputs = (layer(*inputs, rotation, mask, store_of(index)),)
        return inputs[0]

    def next_states(self, outputs: torch.Tensor) -> torch.Tensor:
        """The states [..., D] of the next positions, from outputs [..., D]."""
        return outputs

    def draft_inputs(
        self, token_ids: torch.Tensor, outputs: torch.Tensor, target: Target
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and states [..., D] for drafted tokens [...], where the target has not run.

        `outputs` [..., D] are those that predicted the tokens. In training the tokens are true.
        """
        return self.embed(token_ids, target), self.next_states(outputs)

    @property
    def drafts_blindly(self) -> bool:
        """Whether `draft_inputs` ignores tokens and outputs: then one pass drafts all depths."""
        return False

    @abstractmethod
    def logits(self, outputs: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [..., Vd] of outputs [..., D]."""

    def token_logits(self, index: int, state: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [L, Vd] of outputs [L, D], at all depths alike."""
        return self.logits(state, target)

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """Sum over steps k of depth_decay^(k-1) x the loss against the token k + 1 places on.

        Anchors are the positions whose next token (the root) is supervised. Step k reads the true
        tokens up to k places after the anchor and, as states, the head's own outputs, as in
        decoding. Training unrolls `ttt_steps` steps; larger depths are measured in eval mode only.
        """
        config = self.config
        places, real = anchors_by_row(batch)
        anchors = real.nonzero(as_tuple=True)  # once, not at each step: the host waits for it
        unrolled = Unrolled(self, target, batch, places)
        steps = config.ttt_steps if self.training else self.depth
        outputs = [unrolled.next_outputs()[anchors] for _ in range(steps)]
        weights = depth_weights(config.depth_decay, config.ttt_steps)
        weights += [0.0] * (self.depth - config.ttt_steps)
        return self.loss_by_depth(batch, target, (anchors[0], places[anchors]), outputs, weights)


def anchors_by_row(batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Places [B, A], and which of them [B, A] are anchors and not padding.

    A is the most anchors of any row, but at least 1. Rows with anchors 2 5 and 3 make the places
    (2, 5) and (3, 0), with (1, 1) and (1, 0).
    """
    here = is_anchor(batch)
    counts = here.sum(1)
    most = max(1, int(counts.max()))
    places = (~here).byte().argsort(dim=1, stable=True)[:, :most]
    real = torch.arange(most, device=places.device) < counts[:, None]
    return places.where(real, 0), real


class Unrolled:
    """A head's steps on true tokens from many anchors at once: EAGLE-3's training-time test.

    Step 0 reads the target's features at all positions. Step k is k places after its anchor and
    reads the output of step k - 1. It sees what drafting would see: the keys of step 0 up to the
    anchor, and those of its own anchor's steps 1 to k (Li et al., 2025, arXiv 2503.01840, section
    3.2). For anchors 1 and 2 of four positions the mask of step 2 is::

        1 1 . .   1 .   1 .
        1 1 1 .   . 1   . 1
    """

    def __init__(self, head: RecurrentHead, target: Target, batch: HeadBatch, places: torch.Tensor):
        """`places` [B, A] are the anchors."""
        self.head, self.target, self.batch, self.places = head, target, batch, places
        self.rows = torch.arange(places.shape[0], device=places.device)[:, None]
        self.seen = seen_in_segments(batch.segments)  # [B, T, T] what each position sees of step 0
        self.keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer
        self.done = 0
        self.outputs: torch.Tensor | None = None  # [B, A, D]

    def next_outputs(self) -> torch.Tensor:
        """The next step's outputs [B, A, D] at the anchors."""
        if self.outputs is None:
            self.outputs = self._first()[self.rows, self.places]
        else:
            self.outputs = self._next(self.outputs)
        self.done += 1
        return self.outputs

    def _first(self) -> torch.Tensor:
        """Step 0 at all positions, [B, T, D]."""
        states = self.head.encode(self.batch.features)
        # Positions need not restart with a segment: rotation encodes distances only.
        positions = torch.arange(states.shape[1], device=states.device)[None]
        # The last position has no next token: it gets the first one, and nobody reads its output.
        following = self.batch.input_ids.roll(-1, dims=1)
        return self.head.run_layers(
            self.head.embed(following, self.target),
            states,
            self.head.rotary(positions),
            self.seen[:, None],
            self._keeping,
        )

    def _next(self, outputs: torch.Tensor) -> torch.Tensor:
        """A later step from outputs [B, A, D]."""
        positions = self.places + self.done
        following = (positions + 1).clamp_max(self.batch.input_ids.shape[1] - 1)
        tokens = self.batch.input_ids[self.rows, following]
        embeds, states = self.head.draft_inputs(tokens, outputs, self.target)
        own = torch.eye(self.places.shape[1], dtype=torch.bool, device=states.device)
        own = own.expand(len(self.rows), -1, -1)
        mask = torch.cat([self.seen[self.rows, self.places], *[own] * self.done], dim=-1)
        return self.head.run_layers(
            embeds,
            states,
            self.head.rotary(positions),
            mask[:, None],
            self._keeping,
        )

    def _keeping(self, layer: int) -> Store:
        """`_keep` of a layer."""
        return partial(self._keep, layer)

    def _keep(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a step's keys and values [B, Hkv, n, head_dim] to those of the steps before."""
        if layer in self.keys_values:
            keys, values = (
                torch.cat([old, new], dim=2)
                for old, new in zip(self.keys_values[layer], (keys, values), strict=True)
            )
        self.keys_values[layer] = keys, values
        return keys, values
