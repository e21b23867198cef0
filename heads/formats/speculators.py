"""Directories of vllm-project/speculators: EAGLE-3, P-EAGLE, DFlash and DSpark in one form.

The layers' configuration is nested, as that of a Llama or Qwen3 model. **Layer ids** are those of
transformers' `hidden_states`: 0 is the embeddings and i the output of layer i - 1. Training data of
that project comes from vLLM, where also the last one, i = L, is the state before the final norm.
Ours are one less.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.heads.families.parallel.head import ParallelConfig
from drafthead.heads.families.recurrent.eagle3 import Eagle3Config, Eagle3Head
from drafthead.heads.formats import block_parallel, eagle3
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
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import (
    WRITTEN,
    Keys,
    LayerIds,
    Parts,
    Reasons,
    Size,
    Vocabulary,
    only,
)
from drafthead.heads.formats.layers import SLIDING, layer_keys, window_keys, with_output_bias

KIND = "speculators_model_type"
EAGLES, BLOCKS = ("eagle3", "peagle"), ("dflash", "dspark")
CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
LAYERS = "transformer_layer_config"
TIED = "an output head that is the embedding of its own file is not read here"
WRITTEN_LIKE = "0.9.0"  # the version of speculators whose files we write


class ProposalKeys(Keys):
    """One way to draft."""

    neutral: ClassVar[Reasons] = {
        "how guesses are accepted": "proposal_type verifier_accept_k accept_tolerance"
    }
    speculative_tokens: Parts | None = None


class VerifierKeys(Keys):
    """The target."""

    neutral: ClassVar[Reasons] = {"shown by the target": "architectures"}
    name_or_path: str | None = None


class SpeculatorsConfig(Keys):
    """The keys that say how the head is used."""

    neutral: ClassVar[Reasons] = {
        "repeats speculators_model_type": "algorithm",
        "of one": "default_proposal_method",
    }
    proposal_methods: Annotated[list[ProposalKeys], Field(fail_fast=True)] = Field(default=[])
    verifier: VerifierKeys = VerifierKeys()


class SpeculatorsKeys(Keys):
    """The keys that all kinds of head share."""

    neutral: ClassVar[Reasons] = {
        **WRITTEN,
        "of the writer": "speculators_version has_no_defaults_at_init",
    }
    speculators_model_type: Annotated[
        str, only(*EAGLES, *BLOCKS, why="heads of this kind are not read; serve it with vLLM")
    ]
    transformer_layer_config: dict[str, Any]
    speculators_config: SpeculatorsConfig = SpeculatorsConfig()
    draft_vocab_size: Vocabulary | None = None
    target_hidden_size: Size | None = None
    tie_word_embeddings: Annotated[bool, only(False, why=TIED)] = False


class SpeculatorsEagleKeys(Keys):
    """The keys of EAGLE-3 and P-EAGLE beside EAGLE-3's own."""

    embed_requires_grad: bool | None = None


class SpeculatorsBlockKeys(Keys):
    """The keys of DFlash and DSpark beside DFlash's own."""

    aux_hidden_state_layer_ids: LayerIds = Field(default=[])
    # Whether slots of sliding layers see all of their block; those of others always do. (But vLLM
    # 0.33 reads it as the causality of all layers.)
    sliding_window_non_causal: bool = False


@register_format
class Speculators(WritableFormat):
    """One format for four kinds of head, which a key names."""

    name = "speculators"
    families = ("eagle3", "parallel")
    readers = "speculators, vLLM"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return KIND in checkpoint.config

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        keys = checkpoint.keys(SpeculatorsKeys)
        kind = keys.speculators_model_type
        found = (read_eagle if kind in EAGLES else read_block)(checkpoint, keys, target)
        vocab = found.config.draft_vocab_size or found.config.vocab_size
        keys.check(draft_vocab_size=vocab, target_hidden_size=found.target.hidden_size)
        named = replace(found.target, name=keys.speculators_config.verifier.name_or_path)
        return replace(found, target=named)

    def written(self, export: Export) -> Written:
        config, facts, eagle = export.config, export.facts, isinstance(export.head, Eagle3Head)
        if facts.num_layers is not None and max(config.taps) >= facts.num_layers:
            raise self.cannot_express(
                f"head.taps {list(config.taps)}: the state after the final norm has no id"
            )
        content = (self.describe_eagle if eagle else self.describe_block)(config)
        tensors = export.tensors
        if not eagle:
            tensors = block_parallel.NAMES.written(tensors)
        elif export.target is not None and eagle3.EMBEDDINGS not in tensors:
            tensors[eagle3.EMBEDDINGS] = export.target.input_weight().to(export.dtype)
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": export.head.depth,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        architectures = architectures_of(export.target)
        speculators_config = {
            "algorithm": content[KIND],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": facts.name, "architectures": architectures},
        }
        shared = {
            "architectures": [CLASSES[content[KIND]]],
            "speculators_version": WRITTEN_LIKE,
            "speculators_config": speculators_config,
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "tie_word_embeddings": False,
            "target_hidden_size": None,
        }
        return Written(with_output_bias(tensors), {**shared, **content})

    def describe_eagle(self, config: Eagle3Config) -> dict[str, Any]:
        """The configuration of an EAGLE-3 or P-EAGLE head."""
        if config.hidden_size != config.target_hidden_size:
            raise self.cannot_express(
                f"head.hidden_size {config.hidden_size} on a target of width "
                f"{config.target_hidden_size}"
            )
        kind = "eagle3" if config.mask_token is None else "peagle"
        return {
            KIND: kind,
            eagle3.IDS: [layer + 1 for layer in config.taps],
            "embed_requires_grad": config.embeddings == "own",
            "norm_before_residual": config.norm_before_residual,
            **eagle3.norm_flags(config),
            **({"mask_token_id": config.mask_token} if kind == "peagle" else {}),
            LAYERS: {
                "model_type": "qwen3" if config.qk_norm else "llama",
                **layer_keys(config, config.num_layers, config.vocab_size),
                **window_keys(config.num_layers, config.window),
            },
        }

    def describe_block(self, config: ParallelConfig) -> dict[str, Any]:
        """The configuration of a DFlash head, or, with correction or confidence, of DSpark."""
        block_parallel.refuse_unlike(self, config, {})
        plain = config.correction == "none" and config.confidence_weight == 0
        # Only sliding layers can be causal; a window as long as the context hides nothing.
        window = config.window or (config.max_position_embeddings if config.causal else 0)
        return {
            KIND: "dflash" if plain else "dspark",
            "aux_hidden_state_layer_ids": [layer + 1 for layer in config.taps],
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": config.root_predicts,
            # Of full layers it says nothing, but vLLM 0.33 makes all causal where it is false.
            "sliding_window_non_causal": not config.causal,
            **({} if plain else block_parallel.correction_keys(config)),
            LAYERS: {
                "model_type": "qwen3",
                **layer_keys(config, config.num_layers, config.vocab_size),
                **window_keys(config.num_layers, window),
            },
        }

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """The reader's logits [K, V], by the kind of head that the configuration names."""
        layers = config[LAYERS]
        if config[KIND] in EAGLES:
            return eagle3.replayed(layers, config, tensors, probe)
        slides = layers["layer_types"][0] == SLIDING
        causal = slides and not config["sliding_window_non_causal"]
        seen = block_parallel.Seen(causal, layers["sliding_window"] if slides else 0)
        return block_parallel.replayed(
            layers, config, tensors, probe, config["sample_from_anchor"], seen
        )


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
    parallel, flags = keys.speculators_model_type == "peagle", checkpoint.keys(eagle3.FlagKeys)
    taps, notes = our_taps(flags.eagle_aux_hidden_state_layer_ids, eagle3.IDS, target)
    methods = keys.speculators_config.proposal_methods
    depth = (methods[0].speculative_tokens if methods else None) or Eagle3Config.depth
    trained = checkpoint.keys(SpeculatorsEagleKeys).embed_requires_grad
    trained = parallel if trained is None else trained
    trained = trained and eagle3.EMBEDDINGS in checkpoint.tensors
    options = {
        "norm_before_residual": flags.norm_before_residual,
        "norm_feedback": flags.norm_output,
        "embeddings": "own" if trained else "target",
        "mask_token": eagle3.mask_token_of(checkpoint) if parallel else None,
        "depth": depth,
        "ttt_steps": min(depth, Eagle3Config.ttt_steps),
    }
    found = eagle3.read_eagle3(checkpoint, (LAYERS,), "layers.0.", taps, options)
    eagle3.check_norms(checkpoint, flags, found.config, optional=False)
    return replace(found, notes=notes)


# DFlash and DSpark


def read_block(checkpoint: Checkpoint, keys: SpeculatorsKeys, target: TargetFacts) -> Foreign:
    """A DFlash or DSpark head; `sample_from_anchor` is whether the root's slot drafts too.

    Full layers see all of a block, sliding ones the slots before, unless a key says otherwise.
    """
    own = checkpoint.keys(SpeculatorsBlockKeys)
    block = block_parallel.block_keys(checkpoint, block_parallel.BlockKeys)
    taps, notes = our_taps(own.aux_hidden_state_layer_ids, "aux_hidden_state_layer_ids", target)
    if taps is None:
        raise UserError(
            f"{checkpoint.path} does not say which layers it reads: name the target it was made for"
        )
    if own.sliding_window_non_causal:
        block = block.model_copy(update={"causal": False})
    root = keys.speculators_model_type == "dspark"
    found = block_parallel.read_block(checkpoint, block, taps, root, (LAYERS,))
    shown = f"{', '.join(map(str, taps))} ({eagle3.OUTPUTS})"
    return replace(found, taps=shown, notes=notes)
