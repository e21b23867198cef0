"""Directories of vllm-project/speculators: EAGLE-3, P-EAGLE, DFlash and DSpark in one form.

The layers' configuration is nested, as that of a Llama or Qwen3 model. **Layer ids** are those of
transformers' `hidden_states`: 0 is the embeddings and i the output of layer i - 1. Training data of
that project comes from vLLM, where also the last one, i = L, is the state before the final norm.
Ours are one less.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.families.eagle3 import Eagle3Config, Eagle3Head
from drafthead.heads.families.parallel import ParallelConfig
from drafthead.heads.formats import block_parallel, eagle3
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
from drafthead.heads.formats.files import CONFIG_FILE, Checkpoint, read_json
from drafthead.heads.formats.keys import Keys, LayerIds, Parts, Token, Vocabulary
from drafthead.heads.formats.layers import layer_keys, with_output_bias
from drafthead.heads.target.target import Target

KIND = "speculators_model_type"
EAGLES, BLOCKS = ("eagle3", "peagle"), ("dflash", "dspark")
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
WRITTEN_LIKE = "0.9.0"  # the version of speculators whose files we write


class Proposal(Keys):
    """One way to draft."""

    speculative_tokens: Parts | None = None


class Verifier(Keys):
    """The target."""

    name_or_path: str | None = None


class SpeculatorsConfig(Keys):
    """How the head is used."""

    proposal_methods: Annotated[list[Proposal], Field(fail_fast=True)] = Field(default=[])
    verifier: Verifier = Verifier()


class SpeculatorsKeys(Keys):
    """The keys that all kinds of head share, and optional ones of some."""

    speculators_model_type: Literal["eagle3", "peagle", "dflash", "dspark"]
    transformer_layer_config: dict[str, Any]
    speculators_config: SpeculatorsConfig = SpeculatorsConfig()
    draft_vocab_size: Vocabulary | None = None
    embed_requires_grad: bool | None = None  # EAGLE-3
    aux_hidden_state_layer_ids: LayerIds = Field(default=[])  # DFlash
    sample_from_anchor: bool | None = None  # DFlash


class MaskKeys(Keys):
    """What P-EAGLE, DFlash and DSpark have."""

    mask_token_id: Token


@register_format
class Speculators(WritableFormat):
    """One format for four kinds of head, which a key names."""

    name = "speculators"
    families = ("eagle3", "parallel")
    readers = "speculators, vLLM"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """The configuration has the key."""
        return KIND in checkpoint.config

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head of any of the kinds."""
        keys = checkpoint.keys(SpeculatorsKeys)
        kind = keys.speculators_model_type
        found = (read_eagle if kind in EAGLES else read_block)(checkpoint, keys, target)
        keys.check(draft_vocab_size=found.config.draft_vocab_size or found.config.vocab_size)
        named = replace(found.target, name=keys.speculators_config.verifier.name_or_path)
        return replace(found, target=named)

    def write(
        self, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
    ) -> None:
        """Write the head; raises UserError naming an option that speculators lacks."""
        config, eagle = head.config, isinstance(head, Eagle3Head)
        if facts.num_layers is not None and max(config.taps) >= facts.num_layers:
            raise UserError(
                f"{self.name} cannot express head.taps {list(config.taps)}: the state after the "
                "final norm has no id"
            )
        content = (describe_eagle if eagle else describe_block)(head)
        tensors = head.state_dict()
        if not eagle:
            tensors = block_parallel.their_tensors(tensors)
        elif target is not None and eagle3.EMBEDDINGS not in tensors:
            weight = target.input_weight().to(tensors["fc.weight"].dtype)
            tensors = {**tensors, eagle3.EMBEDDINGS: weight}
        write_tensors(folder, with_output_bias(tensors))
        kind = content[KIND]
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": head.depth,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        speculators_config = {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": facts.name, "architectures": architectures_of(target)},
        }
        shared = {
            "architectures": [CLASSES[kind]],
            "speculators_version": WRITTEN_LIKE,
            "speculators_config": speculators_config,
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "tie_word_embeddings": False,
            "target_hidden_size": None,
        }
        write_config(folder, {**shared, **content})

    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """Logits [K, V], computed as the kind of head does."""
        config, tensors = read_json(folder / CONFIG_FILE), all_tensors(folder)
        layers = config["transformer_layer_config"]
        if config[KIND] in EAGLES:
            return eagle3.replayed(layers, config, tensors, probe)
        mask, root = config["mask_token_id"], config["sample_from_anchor"]
        return block_parallel.replayed(layers, config, tensors, probe, mask, root)


def architectures_of(target: Target | None) -> list[str]:
    """The name of the target's class, from its configuration."""
    model = getattr(target, "model", None)
    return [] if model is None else list(model.config.architectures or [type(model).__name__])


def our_taps(
    ids: list[int], key: str, target: TargetFacts
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Our layers, and notes; without ids the default of speculators, if L is known."""
    if ids:
        return tuple(layer - 1 for layer in ids), ()
    if target.num_layers is None:
        return None, ()
    taps = tuple(layer - 1 for layer in (2, target.num_layers // 2, target.num_layers - 3))
    return taps, (f"no {key} are named: the default is used",)


# EAGLE-3 and P-EAGLE


def read_eagle(checkpoint: Checkpoint, keys: SpeculatorsKeys, target: TargetFacts) -> Foreign:
    """An EAGLE-3 head; P-EAGLE has a mask token and learned taps for positions not yet known.

    Embeddings that were trained are the head's own; others are the target's.
    """
    parallel, flags = keys.speculators_model_type == "peagle", checkpoint.keys(eagle3.Eagle3Keys)
    taps, notes = our_taps(flags.eagle_aux_hidden_state_layer_ids, eagle3.IDS, target)
    methods = keys.speculators_config.proposal_methods
    depth = (methods[0].speculative_tokens if methods else None) or Eagle3Config.depth
    trained = parallel if keys.embed_requires_grad is None else keys.embed_requires_grad
    trained = trained and eagle3.EMBEDDINGS in checkpoint.tensors
    options = {
        "norm_before_residual": flags.norm_before_residual,
        "norm_feedback": flags.norm_output,
        "embeddings": "own" if trained else "target",
        "mask_token": checkpoint.keys(MaskKeys).mask_token_id if parallel else None,
        "depth": depth,
        "ttt_steps": min(depth, Eagle3Config.ttt_steps),
    }
    layers = keys.transformer_layer_config
    found = eagle3.read_eagle3(checkpoint, layers, "layers.0.", taps, options)
    eagle3.check_norms(checkpoint, flags, found.config, optional=False)
    return replace(found, notes=notes)


def describe_eagle(head: DraftHead) -> dict[str, Any]:
    """The configuration of an EAGLE-3 or P-EAGLE head."""
    config: Eagle3Config = head.config
    if config.hidden_size != config.target_hidden_size:
        raise UserError(
            f"speculators cannot express head.hidden_size {config.hidden_size} on a target of "
            f"width {config.target_hidden_size}"
        )
    kind = "eagle3" if config.mask_token is None else "peagle"
    return {
        KIND: kind,
        eagle3.IDS: [layer + 1 for layer in config.taps],
        "embed_requires_grad": config.embeddings == "own",
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_feedback,
        **{key: config.tap_norm == norm for key, norm in eagle3.NORM_FLAGS.items()},
        **({"mask_token_id": config.mask_token} if kind == "peagle" else {}),
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **layer_keys(config, config.num_layers, config.vocab_size),
        },
    }


# DFlash and DSpark


def read_block(checkpoint: Checkpoint, keys: SpeculatorsKeys, target: TargetFacts) -> Foreign:
    """A DFlash or DSpark head; `sample_from_anchor` is whether the root's slot drafts too."""
    named = keys.aux_hidden_state_layer_ids
    taps, notes = our_taps(named, "aux_hidden_state_layer_ids", target)
    if taps is None:
        raise UserError(
            f"{checkpoint.path} does not say which layers it reads: name the target it was made for"
        )
    root = keys.sample_from_anchor
    root = keys.speculators_model_type == "dspark" if root is None else root
    mask, layers = checkpoint.keys(MaskKeys).mask_token_id, keys.transformer_layer_config
    found = block_parallel.read_block(checkpoint, taps, mask, root, layers)
    shown = f"{', '.join(map(str, taps))} ({eagle3.OUTPUTS})"
    return replace(found, taps=shown, notes=notes)


def describe_block(head: DraftHead) -> dict[str, Any]:
    """The configuration of a DFlash head, or, with correction or confidence, of a DSpark head."""
    config: ParallelConfig = head.config
    block_parallel.refuse_unlike("speculators", config, {})
    plain = config.correction == "none" and config.confidence_weight == 0
    return {
        KIND: "dflash" if plain else "dspark",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.taps],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.root_predicts,
        "sliding_window_non_causal": False,
        **({} if plain else block_parallel.correction_keys(config)),
        "transformer_layer_config": {
            "model_type": "qwen3",
            **layer_keys(config, config.num_layers, config.vocab_size),
            "layer_types": ["full_attention"] * config.num_layers,
        },
    }
