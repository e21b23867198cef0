"""A draft model while it is trained: a small language model that learns from a target's answers.

For the loop it is one more head, of the family `draft_model`: packed rows, losses, evaluation and
resuming are the same. It reads tokens alone, and what is written in the end is a model of
transformers, for `--draft-model` and for any other software.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from drafthead.heads.base import MAX_RANK, DraftHead, HeadBatch, HeadLoss
from drafthead.heads.errors import UserError
from drafthead.heads.layers.draft_vocabulary import DraftVocabulary
from drafthead.heads.objectives.anchors import anchor_positions, labels_at
from drafthead.heads.objectives.chunked import Part, in_chunks
from drafthead.heads.objectives.losses import TOKEN_LOSSES, check_token_loss
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.hooks import Taps
from drafthead.heads.target.target import Target
from drafthead.train.draft_models.cut import (
    LAYERS_FOR_ONE,
    architecture_of,
    built,
    copy_layers,
    evenly_spaced,
)
from drafthead.train.features.reading import positions_in_segments, segment_mask

FAMILY = "draft_model"


@dataclass(frozen=True)
class DraftModelConfig:
    """Shape and loss of a draft model. What is not set follows the target."""

    num_layers: int = 0  # of the target's, evenly spaced; 0: one for each eight of them
    layers: tuple[int, ...] = ()  # which of the target's, instead of evenly spaced ones
    depth: int = 6  # tokens after the root, of which accuracies are reported
    loss: str = "soft"  # a name in heads.objectives.losses.TOKEN_LOSSES
    draft_vocab_size: int = 0  # most frequent tokens to guess among; 0: the whole vocabulary
    architecture: dict[str, Any] = field(default_factory=dict)  # transformers' configuration

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON brings a list
        if min(self.num_layers, self.draft_vocab_size) < 0 or self.depth < 1:
            raise ValueError("num_layers and draft_vocab_size must not be negative, depth not 0")
        if self.num_layers and self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"num_layers is {self.num_layers}, but layers names {self.layers}")
        check_token_loss(self.loss)


class Student(DraftVocabulary, DraftHead):
    """The language model, with its loss on packed rows."""

    family = FAMILY
    config_class = DraftModelConfig

    def __init__(self, config: DraftModelConfig):
        """A model of random weights."""
        super().__init__(config)
        self.model: PreTrainedModel = built(config.architecture)
        self._language_model = Target(self.model)
        self.model.requires_grad_(True)
        self.add_draft_vocabulary(self._language_model.vocab_size, config.draft_vocab_size)

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        """`config` with layers, sizes and architecture filled in from the target.

        Raises UserError for layers that the target lacks, more of them, or more draft tokens.
        """
        if config.draft_vocab_size > target.vocab_size:
            raise UserError(
                f"head.draft_vocab_size is {config.draft_vocab_size}, but the target has "
                f"{target.vocab_size} tokens"
            )
        count = config.num_layers or len(config.layers) or -(-target.num_layers // LAYERS_FOR_ONE)
        if count > target.num_layers:
            raise UserError(f"head.num_layers is {count}, but the target has {target.num_layers}")
        layers = config.layers or evenly_spaced(count, target.num_layers)
        architecture = architecture_of(target, layers)
        return replace(config, num_layers=len(layers), layers=layers, architecture=architecture)

    @property
    def features_needed(self) -> FeatureSpec:
        """The target's final states, where the loss reads its distributions; else nothing."""
        return FeatureSpec(layers=(), last=TOKEN_LOSSES[self.config.loss].reads_target)

    @property
    def depth(self) -> int:
        """Of the drafts whose accuracies are reported."""
        return self.config.depth

    def initialize(self, target: Target) -> None:
        """Copy the target's chosen layers, and all around them."""
        copy_layers(target, self.config.layers, self.model)

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """Sum over the tokens that drafts guess of the token loss.

        A draft of `depth` tokens begins after every root, so that a token deep in an answer is
        guessed by `depth` drafts, always after the same tokens: it is computed once. It counts by
        the share of the `depth` drafts that guess it, less than 1 next to the answer's beginning
        only, or in an on-policy stage.
        """
        rows, anchors = anchor_positions(batch)
        valid = [labels_at(batch, rows, anchors, k + 2)[0] for k in range(self.depth)]
        at = [(rows[here], anchors[here] + k + 1) for k, here in enumerate(valid)]
        times = torch.zeros_like(batch.input_ids)  # [B, T] drafts that guess the token after it
        for places in at:
            times[places] += 1
        rows_of, places_of = guessed = times.nonzero(as_tuple=True)  # [P] before guessed tokens
        rule = TOKEN_LOSSES[self.config.loss]

        @in_chunks(self.num_guesses, self.parameters())
        def losses(
            hidden: torch.Tensor,  # [P, D]
            teacher: torch.Tensor,  # [P, D] the target's final states
            labels: torch.Tensor,  # [P]
            weights: torch.Tensor,  # [P]
        ) -> Iterator[Part]:
            logits = self._language_model.project(hidden, self.draft_ids)
            teacher_logits = self.teacher_logits(teacher, target) if rule.reads_target else None
            token_losses, ranks = self.judged(logits, teacher_logits, labels, rule)
            yield (weights * token_losses).sum(), token_losses, ranks

        hidden = self._hidden(batch)[guessed]
        last = batch.features.last
        # Where the loss reads no distribution of the target there are no features to choose from.
        teacher = hidden.detach() if last is None else last[guessed]
        labels = batch.input_ids[rows_of, places_of + 1]
        total, (judged,) = losses(hidden, teacher, labels, times[guessed] / self.depth)
        of_tokens = judged[0].new_zeros(times.shape).index_put(guessed, judged[0])
        ranks = torch.full_like(times, MAX_RANK).index_put(guessed, judged[1])
        missing = torch.full_like(rows, MAX_RANK)
        by_depth = zip(valid, at, strict=True)
        return HeadLoss(
            total=total,
            depth_losses=torch.stack([of_tokens[places].sum() for places in at]),
            depth_counts=torch.stack([here.sum() for here in valid]),
            ranks=torch.stack([missing.masked_scatter(h, ranks[p]) for h, p in by_depth], dim=1),
        )

    def _hidden(self, batch: HeadBatch) -> torch.Tensor:
        """The model's final hidden states [B, T, D], of each segment for itself."""
        model = self._language_model
        casts = torch.is_autocast_enabled(model.device.type)
        dtype = torch.get_autocast_dtype(model.device.type) if casts else model.dtype
        nowhere = torch.empty(0, dtype=torch.long, device=model.device)
        with Taps(model, FeatureSpec()) as taps:
            model.forward(
                batch.input_ids,
                positions_in_segments(batch.segments),
                segment_mask(batch.segments, dtype),
                logits_to_keep=nowhere,
            )
        hidden = taps.features().last
        assert hidden is not None
        return hidden
