"""DFlash and DSpark as their authors store them, and DFlash as transformers' generation reads it.

DSpark is DFlash with a correction by the token before, and a confidence. Its files hold copies of
the target's embeddings and output head, and every slot of a block drafts, including the root's.

**Layer ids** name the OUTPUT of a layer, as ours do, but are read as transformers'
`hidden_states[id + 1]`, so the id of the last layer, L - 1, means the state after the final norm.
Our number of that state is L. DSpark has -1 for the embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from drafthead.core.errors import UserError
from drafthead.heads.families.parallel.head import ParallelConfig
from drafthead.heads.formats.base import (
    Export,
    Foreign,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    Written,
    register_format,
)
from drafthead.heads.formats.block_parallel import (
    NAMES,
    NESTED,
    IdKeys,
    Seen,
    block_keys,
    correction_keys,
    read_block,
    refuse_unlike,
    replayed,
)
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import Keys, Renaming, TargetLayers, our_taps
from drafthead.heads.formats.layers import (
    SLIDING,
    layer_keys,
    num_layers_of,
    window_keys,
    with_output_bias,
)


def default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """The layer ids of a file without any: evenly spaced from 1 to L - 3, or the middle one.

    Three draft layers on a target of 12 read layers 1, 5 and 9.
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [round(1 + step * index) for index in range(num_layers)]


class OtherCount(Keys):
    """TorchSpec's count of the target's layers; its `num_target_layers` counts those tapped."""

    target_num_hidden_layers: TargetLayers | None = None


def num_layers_of_target(checkpoint: Checkpoint, keys: IdKeys, target: TargetFacts) -> int:
    """Return how many layers the target has, by the file or else by `target`.

    Raises UserError when neither knows.
    """
    found = checkpoint.keys(OtherCount).target_num_hidden_layers
    if found is None:
        found = keys.num_target_layers or target.num_layers
    elif keys.num_target_layers not in (None, len(keys.target_layer_ids or ())):
        raise UserError(
            f"{checkpoint.config_file}: num_target_layers is {keys.num_target_layers}, but beside "
            "target_num_hidden_layers it must count the target_layer_ids"
        )
    if found is None:
        raise UserError(f"{checkpoint.config_file}: num_target_layers is missing: name the target")
    return found


# Values of options that readers know.
BIDIRECTIONAL = {"causal": (False,), "window": (0,)}
PLAIN = {
    "root_predicts": (False,),
    "correction": ("none",),
    "draft_vocab_size": (0,),
    "confidence_weight": (0.0,),
}


class BlockFiles(WritableFormat):
    """The common part of files whose ids are read as `hidden_states[id + 1]`."""

    families = ("parallel",)
    parts: ClassVar[frozenset[str]]  # tensors that only such files have together
    lacks: ClassVar[frozenset[str]] = (
        frozenset()
    )  # tensors that another format's files have beside them
    options: ClassVar[Mapping[str, tuple[Any, ...]]]  # values that the reader knows
    root_predicts = False  # whether the root's slot drafts, where a file does not say
    lowest_id = 0
    renaming = NAMES

    def recognises(self, checkpoint: Checkpoint) -> bool:
        names = set(checkpoint.tensors)
        is_other = self.lacks & names or "speculators_model_type" in checkpoint.config
        return self.parts <= names and not is_other

    def missing_ids(self, num_target_layers: int, num_layers: int) -> list[int]:
        """The ids that a file without any means: none, which is refused."""
        return []

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head; the number of target layers decides which id is the last layer.

        DSpark of Model-Optimizer and SpecForge has DFlash's form, too, but `projector_type` names
        it, and its root's slot drafts.
        """
        keys = block_keys(checkpoint, IdKeys)
        num_layers, ids = num_layers_of_target(checkpoint, keys, target), keys.target_layer_ids
        if ids is None:
            ids = self.missing_ids(num_layers, num_layers_of(checkpoint.tensors))
        root_predicts = self.root_predicts or keys.projector_type == "dspark"
        taps = our_taps(ids, num_layers)
        known = target.vocab_size, self.renaming
        found = read_block(checkpoint, keys, taps, root_predicts, (), *known)
        shown = f"{', '.join(map(str, ids))} (hidden_states[id + 1]: output of layer, the last one "
        return replace(
            found,
            target=replace(found.target, num_layers=num_layers),
            taps=shown + "after the final norm)",
        )

    def written(self, export: Export) -> Written:
        config, num_layers = export.config, export.facts.num_layers
        refuse_unlike(self, config, self.options)
        if num_layers is None:
            raise UserError(
                f"{self.name} needs to know how many layers the target has: name the target"
            )
        named = {
            "mask_token_id": config.mask_token,
            "target_layer_ids": self.their_ids(config.taps, num_layers),
        }
        described = {
            "model_type": "qwen3",
            **layer_keys(config, config.num_layers, config.vocab_size),
            **window_keys(config.num_layers, config.window),
            "block_size": config.block_size,
            "num_target_layers": num_layers,
            **self.own_keys(config, named),
            "base_model_name_or_path": export.facts.name,
        }
        return Written(with_output_bias(self.renaming.written(export.tensors)), described)

    def own_keys(self, config: ParallelConfig, named: dict[str, Any]) -> dict[str, Any]:
        """The format's keys of the configuration; `named` are the mask token and the layer ids."""
        raise NotImplementedError

    def their_ids(self, taps: tuple[int, ...], num_target_layers: int) -> list[int]:
        """The ids for our layers; raises UserError for a layer without id."""
        last, refused = num_target_layers - 1, f"head.taps {list(taps)}: "
        for tap in taps:
            if tap == last:
                raise self.cannot_express(
                    f"{refused}for layer {tap}, the last one, its reader uses the state after the "
                    "final norm"
                )
            if tap < self.lowest_id:
                raise self.cannot_express(f"{refused}its reader cannot tap layer {tap}")
        return [last if tap == num_target_layers else tap for tap in taps]

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V] of one pass over the block, each slot corrected by the token before it.

        The first slot predicts nothing where the root's slot is not used.
        """
        return replayed(config, config, tensors, probe, self.root_predicts, Seen())


@register_format
class DFlash(BlockFiles):
    """z-lab's files: no embeddings and no output head, ids under `dflash_config`."""

    name = "dflash"
    readers = "z-lab/dflash, SGLang, vLLM"
    parts = frozenset({"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"})
    lacks = frozenset({"lm_head.weight"})
    options = PLAIN

    def missing_ids(self, num_target_layers: int, num_layers: int) -> list[int]:
        return default_ids(num_target_layers, num_layers)

    def own_keys(self, config: ParallelConfig, named: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            "is_causal": config.causal,  # which SGLang reads
            "dflash_config": {**named, "causal": config.causal},  # which vLLM reads
        }

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V] of one pass over the block, whose first slot predicts nothing."""
        slides = config["layer_types"][0] == SLIDING
        seen = Seen(config["is_causal"], config["sliding_window"] if slides else 0)
        return replayed(config, {**config, **config[NESTED]}, tensors, probe, False, seen)


# The names in transformers of the modules between the target's features and the layers.
ENCODER = {
    "encoder.fc.": "transformer.fc.",
    "encoder.output_norm_enc.": "transformer.hidden_norm.",
}


@register_format
class DFlashTransformers(BlockFiles):
    """The one DFlash drafter that transformers 5.23 can load, with its names and keys.

    `AutoModel.from_pretrained` returns an assistant for
    `model.generate(speculation_type="dflash")`. The projection of the features is called an
    encoder.
    """

    name = "dflash-transformers"
    readers = "transformers"
    parts = frozenset(f"{theirs}weight" for theirs in ENCODER)
    renaming = Renaming({**ENCODER, **NAMES.table})
    options: ClassVar = {**PLAIN, **BIDIRECTIONAL, "attention_bias": (False,)}

    def own_keys(self, config: ParallelConfig, named: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            **named,
            "sliding_window": config.max_position_embeddings,  # required, but no layer slides
        }

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """The reader's logits [K, V], computed under the names of z-lab's files."""
        usual = {NAMES.theirs(self.renaming.ours(name)): t for name, t in tensors.items()}
        return super().replayed(config, usual, probe)


@register_format
class DSpark(BlockFiles):
    """DeepSpec's files: a block transformer with copies of the target's weights."""

    name = "dspark"
    readers = "deepseek-ai/DeepSpec"
    parts = DFlash.parts | {"embed_tokens.weight", "lm_head.weight"}
    options: ClassVar = {**BIDIRECTIONAL, "root_predicts": (True,), "draft_vocab_size": (0,)}
    root_predicts = True
    lowest_id = -1

    def written(self, export: Export) -> Written:
        """The head and copies of weights of the target, which is required."""
        target = self.needed_target(export, "copies of the target's embeddings and output head")
        found = super().written(export)
        found.tensors["embed_tokens.weight"] = target.input_weight().to(export.dtype)
        found.tensors["lm_head.weight"] = target.output_weight().detach().to(export.dtype)
        return found

    def own_keys(self, config: ParallelConfig, named: dict[str, Any]) -> dict[str, Any]:
        architectures = ["Qwen3DSparkModel"]
        return {"architectures": architectures, **correction_keys(config), **named}
