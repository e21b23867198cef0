"""Directories of vllm-project/speculators: EAGLE-3, P-EAGLE, DFlash and DSpark in one form.

The layers' configuration is nested, as that of a Llama or Qwen3 model. **Layer ids** are those of
transformers' `hidden_states`: 0 is the embeddings and i the output of layer i - 1. Training data of
that project comes from vLLM, where also the last one, i = L, is the state before the final norm.
Ours are one less.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.families.eagle3 import Eagle3Config, Eagle3Head
from drafthead.heads.families.parallel import ParallelConfig
from drafthead.heads.formats import block_parallel, eagle3
from drafthead.heads.formats.base import (
    MOST_DRAFTED,
    Foreign,
    Probe,
    TargetFacts,
    WritableFormat,
    all_tensors,
    check_claims,
    register_format,
    write_config,
    write_tensors,
)
from drafthead.heads.formats.files import CONFIG_FILE, Checkpoint, read_json
from drafthead.heads.formats.layers import layer_keys, whole_numbers, with_output_bias
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
        config, where = checkpoint.config, checkpoint.weights.parent / CONFIG_FILE
        kind, nested = config[KIND], config.get("transformer_layer_config")
        if kind not in (*EAGLES, *BLOCKS):
            raise UserError(
                f"{where}: {KIND} is {kind!r}; known are {', '.join((*EAGLES, *BLOCKS))}"
            )
        if not isinstance(nested, dict):
            raise UserError(f"{where} has no transformer_layer_config")
        layers = replace(checkpoint, config=nested)
        found = (read_eagle if kind in EAGLES else read_block)(checkpoint, layers, target)
        check_claims(
            checkpoint, draft_vocab_size=found.config.draft_vocab_size or found.config.vocab_size
        )
        named = replace(found.target, name=verifier_name(config))
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


def verifier_name(config: dict[str, Any]) -> str | None:
    """The target's name in the file."""
    content = config.get("speculators_config")
    verifier = content.get("verifier") if isinstance(content, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def speculative_tokens(config: dict[str, Any]) -> int | None:
    """The number of tokens to draft at once, if the file has it."""
    content = config.get("speculators_config")
    methods = content.get("proposal_methods") if isinstance(content, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return count if type(count) is int and 0 < count <= MOST_DRAFTED else None


def architectures_of(target: Target | None) -> list[str]:
    """The name of the target's class, from its configuration."""
    model = getattr(target, "model", None)
    return [] if model is None else list(model.config.architectures or [type(model).__name__])


def stated_taps(
    checkpoint: Checkpoint, key: str, target: TargetFacts
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Our layers, and notes; without ids the default of speculators, if L is known."""
    ids = whole_numbers(checkpoint, key, checkpoint.config.get(key))
    if ids:
        return tuple(layer - 1 for layer in ids), ()
    if target.num_layers is None:
        return None, ()
    taps = tuple(layer - 1 for layer in (2, target.num_layers // 2, target.num_layers - 3))
    return taps, (f"no {key} are named: the default is used",)


# EAGLE-3 and P-EAGLE


def read_eagle(checkpoint: Checkpoint, layers: Checkpoint, target: TargetFacts) -> Foreign:
    """An EAGLE-3 head; P-EAGLE has a mask token and learned taps for positions not yet known.

    Embeddings that were trained are the head's own; others are the target's.
    """
    flag, parallel = checkpoint.flag, checkpoint.config[KIND] == "peagle"
    taps, notes = stated_taps(checkpoint, eagle3.IDS, target)
    depth = speculative_tokens(checkpoint.config) or Eagle3Config.depth
    trained = flag("embed_requires_grad", parallel) and eagle3.EMBEDDINGS in checkpoint.tensors
    options = {
        "norm_before_residual": flag("norm_before_residual", False),
        "norm_feedback": flag("norm_output", False),
        "embeddings": "own" if trained else "target",
        "mask_token": checkpoint.integer("mask_token_id") if parallel else None,
        "depth": depth,
        "ttt_steps": min(depth, Eagle3Config.ttt_steps),
    }
    found = eagle3.read_eagle3(layers, "layers.0.", taps, options)
    eagle3.check_norms(checkpoint, found.config, optional=False)
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


def read_block(checkpoint: Checkpoint, layers: Checkpoint, target: TargetFacts) -> Foreign:
    """A DFlash or DSpark head; `sample_from_anchor` is whether the root's slot drafts too."""
    taps, notes = stated_taps(checkpoint, "aux_hidden_state_layer_ids", target)
    if taps is None:
        raise UserError(
            f"{checkpoint.path} does not say which layers it reads: name the target it was made for"
        )
    root = checkpoint.flag("sample_from_anchor", checkpoint.config[KIND] == "dspark")
    mask = checkpoint.integer("mask_token_id")
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
