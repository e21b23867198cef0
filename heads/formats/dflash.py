"""DFlash as z-lab stores it, and as transformers' own generation reads it.

**Layer ids** name the OUTPUT of a layer, as ours do, but are read as transformers'
`hidden_states[id + 1]`, so the id of the last layer, L - 1, means the state after the final norm.
Our number of that state is L.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.families.parallel.head import ParallelConfig
from drafthead.heads.formats.base import (
    Foreign,
    Probe,
    TargetFacts,
    WritableFormat,
    all_tensors,
    register_format,
    write_config,
    write_tensors,
)
from drafthead.heads.formats.block_parallel import (
    IdKeys,
    Seen,
    block_keys,
    read_block,
    refuse_unlike,
    replayed,
    their_tensors,
    window_keys,
)
from drafthead.heads.formats.files import Checkpoint, read_json
from drafthead.heads.formats.keys import Keys, TargetLayers
from drafthead.heads.formats.layers import SLIDING, layer_keys, num_layers_of, with_output_bias
from drafthead.heads.target.target import Target


def default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """The layer ids of a file without any: evenly spaced from 1 to L - 3, or the middle one.

    Three draft layers on a target of 12 read layers 1, 5 and 9.
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [round(1 + step * index) for index in range(num_layers)]


def our_taps(ids: list[int], num_target_layers: int) -> tuple[int, ...]:
    """Our layers for ids that are read as `hidden_states[id + 1]`: for 4 layers 0 3 are 0 4."""
    return tuple(num_target_layers if i == num_target_layers - 1 else i for i in ids)


def their_ids(name: str, taps: tuple[int, ...], num_target_layers: int, lowest: int) -> list[int]:
    """The ids for our layers; raises UserError for a layer without id."""
    last = num_target_layers - 1
    for tap in taps:
        if tap == last or tap < lowest:
            raise UserError(
                f"{name} cannot express head.taps {list(taps)}: "
                + (
                    f"for layer {tap}, the last one, its reader uses the state after the final norm"
                    if tap == last
                    else f"its reader cannot tap layer {tap}"
                )
            )
    return [last if tap == num_target_layers else tap for tap in taps]


def num_layers_known(name: str, facts: TargetFacts) -> int:
    """The target's number of layers; raises UserError when it is not known."""
    if facts.num_layers is None:
        raise UserError(f"{name} needs to know how many layers the target has: name the target")
    return facts.num_layers


class OtherCount(Keys):
    """TorchSpec's count of the target's layers; its `num_target_layers` counts those tapped."""

    target_num_hidden_layers: TargetLayers | None = None


def num_layers_of_target(checkpoint: Checkpoint, keys: IdKeys, target: TargetFacts) -> int:
    """How many layers the target has, by the file or else by `target`.

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


def described(config: ParallelConfig, num_target_layers: int) -> dict[str, Any]:
    """The configuration keys that all forms of DFlash and DSpark share."""
    return {
        "model_type": "qwen3",
        **layer_keys(config, config.num_layers, config.vocab_size),
        **window_keys(config.num_layers, config.window),
        "block_size": config.block_size,
        "num_target_layers": num_target_layers,
    }


BIDIRECTIONAL = {"causal": (False,), "window": (0,)}
PLAIN = {
    "root_predicts": (False,),
    "correction": ("none",),
    "draft_vocab_size": (0,),
    "confidence_weight": (0.0,),
}


@register_format
class DFlash(WritableFormat):
    """z-lab's files: no embeddings and no output head, ids under `dflash_config`."""

    name = "dflash"
    families = ("parallel",)
    readers = "z-lab/dflash, SGLang, vLLM"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """A block transformer without a copy of the target's output head."""
        names = checkpoint.tensors
        parts = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"}
        return (
            parts <= set(names)
            and "lm_head.weight" not in names
            and "speculators_model_type" not in checkpoint.config
        )

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head; without ids, the taps are `default_ids`.

        DSpark of Model-Optimizer and SpecForge has this form, too, and drafts from the root's slot.
        """
        keys = block_keys(checkpoint, IdKeys)
        num_layers = num_layers_of_target(checkpoint, keys, target)
        ids = keys.target_layer_ids
        if ids is None:
            ids = default_ids(num_layers, num_layers_of(checkpoint.tensors))
        return block_with_ids(
            checkpoint, keys, ids, num_layers, keys.projector_type == "dspark", target.vocab_size
        )

    def write(
        self, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
    ) -> None:
        """Write the head; raises UserError naming an option that DFlash lacks."""
        config, num_layers = head.config, num_layers_known(self.name, facts)
        refuse_unlike(self.name, config, PLAIN)
        ids = their_ids(self.name, config.taps, num_layers, lowest=0)
        tensors = with_output_bias(their_tensors(head.state_dict()))
        write_tensors(folder, tensors)
        named = {
            "mask_token_id": config.mask_token,
            "target_layer_ids": ids,
            "causal": config.causal,  # which vLLM reads
        }
        content = {
            "architectures": ["DFlashDraftModel"],
            **described(config, num_layers),
            "is_causal": config.causal,  # which SGLang reads
            "dflash_config": named,
        }
        write_config(folder, {**content, "base_model_name_or_path": facts.name})

    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """Logits [K, V] of one pass over the block, whose first slot predicts nothing."""
        config = read_json(folder / "config.json")
        mask = config["dflash_config"]["mask_token_id"]
        slides = config["layer_types"][0] == SLIDING
        seen = Seen(config["is_causal"], config["sliding_window"] if slides else 0)
        return replayed(config, config, all_tensors(folder), probe, mask, False, seen)


def block_with_ids(
    checkpoint: Checkpoint,
    keys: IdKeys,
    ids: list[int],
    num_layers: int,
    root_predicts: bool,
    vocab_size: int | None,
) -> Foreign:
    """A head that taps `hidden_states[id + 1]` of a target with `num_layers` layers."""
    taps = our_taps(ids, num_layers)
    found = read_block(checkpoint, keys, taps, root_predicts, vocab_size=vocab_size)
    return replace(
        found,
        target=replace(found.target, num_layers=num_layers),
        taps=f"{', '.join(map(str, ids))} (hidden_states[id + 1]: output of layer, the last one "
        "after the final norm)",
    )


# The names in transformers of the modules between the target's features and the layers.
ENCODER = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


@register_format
class DFlashTransformers(WritableFormat):
    """The one DFlash drafter that transformers 5.23 can load, with its names and keys.

    `AutoModel.from_pretrained` returns an assistant for
    `model.generate(speculation_type="dflash")`.
    """

    name = "dflash-transformers"
    families = ("parallel",)
    readers = "transformers"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """The projection of the features is called an encoder."""
        return {"encoder.fc.weight", "encoder.output_norm_enc.weight"} <= set(checkpoint.tensors)

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head; the number of target layers decides which id is the last layer."""
        keys = block_keys(checkpoint, IdKeys)
        num_layers = num_layers_of_target(checkpoint, keys, target)
        ids = keys.target_layer_ids or []
        found = block_with_ids(checkpoint, keys, ids, num_layers, False, target.vocab_size)
        tensors = {f"transformer.{b}": f"transformer.{a}" for a, b in ENCODER.items()}
        return replace(
            found,
            tensors={
                next((n.replace(o, new) for o, new in tensors.items() if n.startswith(o)), n): t
                for n, t in found.tensors.items()
            },
        )

    def write(
        self, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
    ) -> None:
        """Write the head; raises UserError naming an option that the reader lacks."""
        config, num_layers = head.config, num_layers_known(self.name, facts)
        refuse_unlike(self.name, config, {**PLAIN, **BIDIRECTIONAL, "attention_bias": (False,)})
        ids = their_ids(self.name, config.taps, num_layers, lowest=0)
        tensors = their_tensors(head.state_dict())
        for ours, theirs in ENCODER.items():
            tensors[theirs + "weight"] = tensors.pop(ours + "weight")
        write_tensors(folder, tensors)
        content = {
            **described(config, num_layers),
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "mask_token_id": config.mask_token,
            "target_layer_ids": ids,
            "sliding_window": config.max_position_embeddings,  # required, but no layer slides
        }
        write_config(folder, {**content, "base_model_name_or_path": facts.name})

    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """Logits [K, V], computed as from z-lab's files, under other names."""
        config, tensors = read_json(folder / "config.json"), all_tensors(folder)
        for ours, theirs in ENCODER.items():
            tensors[ours + "weight"] = tensors.pop(theirs + "weight")
        return replayed(config, config, tensors, probe, config["mask_token_id"], False, Seen())
