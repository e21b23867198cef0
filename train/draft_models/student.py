"""A draft model while it is trained: a small language model that learns from a target's answers.

For the loop it is one more head, of the family `draft_model`: packed rows, losses, evaluation and
resuming are the same. It reads tokens alone, and what is written in the end is a model of
transformers, for `--draft` and for any other software.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.settings import Count, FromZero, settings
from drafthead.core.storage.files import let_others_read, write_json, write_text
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.architecture import LAYER_NAMES, find_decoder, keep_layers
from drafthead.core.target.block_modules import blocks_in
from drafthead.core.target.blocks import Blocks
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.hooks import Taps
from drafthead.core.target.placement import whole_weight
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.families.by_depth import by_anchor, guessed_tokens
from drafthead.heads.layers.draft_vocabulary import DraftVocabulary, tables_of
from drafthead.heads.layers.segments import positions_in_segments, segment_mask
from drafthead.heads.objectives.anchors import anchor_positions
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch, HeadLoss
from drafthead.heads.objectives.chunked import Part, in_chunks
from drafthead.heads.objectives.losses import TOKEN_LOSSES, LossName
from drafthead.infer.drafters.frequent_tokens import (
    DRAFT_IDS,
    DRAFT_IDS_FILE,
    read_draft_vocabulary,
)

FAMILY = "draft_model"


@settings
class DraftModelConfig:
    """Shape and loss of a draft model. What is not set follows the target."""

    num_layers: FromZero = 0  # of the target's, evenly spaced; 0: one for each eight of them
    layers: tuple[int, ...] = ()  # which of the target's, instead of evenly spaced ones
    depth: Count = 6  # tokens after the root, of which accuracies are reported
    loss: LossName = "soft"  # a name in heads.objectives.losses.TOKEN_LOSSES
    draft_vocab_size: FromZero = 0  # most frequent tokens to guess among; 0: the whole vocabulary
    architecture: dict[str, Any] = field(default_factory=dict)  # transformers' configuration

    def __post_init__(self) -> None:
        if self.num_layers and self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"num_layers is {self.num_layers}, but layers names {self.layers}")


class Student(DraftVocabulary, DraftHead):
    """The language model, with its loss on packed rows."""

    family = FAMILY
    config_class = DraftModelConfig

    def __init__(self, config: DraftModelConfig):
        """A model of random weights."""
        super().__init__(config)
        self.model: PreTrainedModel = built(config.architecture)
        self._language_model = Target(self.model)
        self.add_draft_vocabulary(self._language_model.vocab_size, config.draft_vocab_size)

    @classmethod
    def sized(cls, config: Any, target: Target) -> Any:
        """`config` with layers, sizes and architecture filled in from the target.

        Raises UserError for layers that the target lacks, more of them, or more draft tokens, and
        for a target whose layers carry a running state, which no mask of packed rows resets.
        """
        target.refuse_states("a draft model cut out of the target")
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
        copy_layers(target, self.config.layers, self.model)

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """Sum over the tokens that drafts guess of the token loss.

        A draft of `depth` tokens begins after every root, so that a token deep in an answer is
        guessed by `depth` drafts, always after the same tokens: it is computed once. It counts by
        the share of the `depth` drafts that guess it, less than 1 next to the answer's beginning
        only.
        """
        rows, anchors = anchor_positions(batch)
        guessed = guessed_tokens(batch, rows, anchors, self.depth)
        places, here = guessed.places, guessed.anchors >= 0  # [P], [P, K]
        rule = TOKEN_LOSSES[self.config.loss]

        @in_chunks(self.num_guesses, self.parameters())
        def losses(
            hidden: torch.Tensor,  # [P, D]
            teacher: torch.Tensor,  # [P, D] the target's final states
            labels: torch.Tensor,  # [P]
            weights: torch.Tensor,  # [P]
        ) -> Iterator[Part]:
            """The weighted sum [] that is trained, token losses and ranks [P]."""
            logits = self._language_model.project(hidden, self.draft_ids)
            teacher_logits = self.teacher_logits(teacher, target) if rule.reads_target else None
            token_losses, ranks = self.judged(logits, teacher_logits, labels, rule)
            yield (weights * token_losses).sum(), token_losses, ranks

        hidden = self._hidden(batch).flatten(0, 1)[places]
        last = batch.features.last
        # Where the loss reads no distribution of the target there are no features to choose from.
        teacher = hidden.detach() if last is None else last.flatten(0, 1)[places]
        labels = batch.input_ids.flatten()[places + 1]
        total, ((of_tokens, ranks),) = losses(hidden, teacher, labels, here.sum(1) / self.depth)
        of_depths = [(of_tokens.where(h, 0), ranks.where(h, MAX_RANK)) for h in here.unbind(1)]
        return by_anchor(total, of_depths, guessed, len(anchors), self.depth)

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
    stored: dict[str, torch.Tensor | Blocks] = {**source.state_dict(), **blocks_in(source)}
    for name, found in stored.items():
        first, _, rest = name.partition(".")
        layer, _, inner = rest.partition(".")
        if first in LAYER_NAMES and layer not in name_of:
            continue
        tensor = found.dequantised(target.dtype) if isinstance(found, Blocks) else found
        if first not in LAYER_NAMES:
            weights[name] = tensor
        else:
            weight = whole_weight(source, name, tensor)
            weights[f"{first}.{name_of[layer]}.{inner}"] = weight
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if shapes != {name: tensor.shape for name, tensor in draft.items()}:
        raise UserError(
            "a draft model cannot be cut out of this target: its weights are quantised, or have "
            "adapters that are not merged"
        )
    find_decoder(model).load_state_dict(weights)
    model.get_output_embeddings().load_state_dict(
        {**target.output_head.state_dict(), "weight": target.output_weight()}
    )


ORIGIN_FILE = "training.json"


def save_draft_model(
    student: Student, folder: Path, target: Target, target_name: str, origin: dict[str, Any]
) -> None:
    """Write the model in bfloat16, its tokenizer and its origin; the student keeps that type.

    Every file is written under a temporary name and renamed. `origin` is anything JSON can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".model.", dir=folder) as temporary:
        student.model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps Module.to
        student.model.save_pretrained(temporary)
        assert target.tokenizer is not None  # a target read from disk has one
        target.tokenizer.save_pretrained(temporary)
        guesses = student.draft_ids
        if guesses is not None:
            write_text(Path(temporary) / DRAFT_IDS_FILE, json.dumps({DRAFT_IDS: guesses.tolist()}))
        write_json(Path(temporary) / ORIGIN_FILE, {"target": target_name, **origin})
        for file in sorted(Path(temporary).iterdir()):
            let_others_read(file)
            shutil.move(file, folder / file.name)


def draft_model_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a draft model in a folder, by the names that a student has for them.

    Raises UserError when no model can be loaded from it.
    """
    trained = load_decoder_only(folder, "float32", "cpu")
    weights = {f"model.{name}": tensor for name, tensor in trained.model.state_dict().items()}
    guesses = read_draft_vocabulary(trained)
    if guesses is not None:
        weights["d2t"], weights["t2d"] = tables_of(guesses, trained.vocab_size)
    return weights
