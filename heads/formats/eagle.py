"""EAGLE-1 and EAGLE-2 (Li et al., 2024): one layout of weights, the trees make the difference.

`fc` over embedding and feature, then Llama layers, the first without its first norm; no final norm
and no output head. The embedding in the file is a copy of the target's.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch

from drafthead.heads.families.recurrent.eagle import EagleConfig
from drafthead.heads.formats.base import (
    DEPTH,
    PICKLE,
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
from drafthead.heads.formats.keys import WRITTEN, Keys, Parts, Place, Reasons, Vocabulary
from drafthead.heads.formats.layers import (
    LayerKeys,
    PlainLayers,
    common_window,
    layer_keys,
    layer_options,
    num_layers_of,
)

QUERY, EMBEDDING = "layers.0.self_attn.q_proj.weight", "embed_tokens.weight"
USUAL_DEPTH = 5  # tokens drafted after the root; the official default


class EagleKeys(LayerKeys):
    """The official keys, and one of ours."""

    bias: bool | None = None  # of `fc`
    draft_vocab_size: Vocabulary | None = None
    drafthead_depth: Parts | None = None


class WrapperKeys(Keys):
    """Older vLLM's keys around the draft's configuration."""

    neutral: ClassVar[Reasons] = {**WRITTEN, "how vLLM drafts": "method num_lookahead_tokens"}
    model_type: str
    model: EagleKeys
    truncated_vocab_size: Vocabulary | None = None


@register_format
class Eagle(WritableFormat):
    """The official layout, which vLLM and SGLang read as well."""

    name = "eagle"
    families = ("eagle",)
    readers = "EAGLE, vLLM, SGLang"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """`fc` reads two vectors and there is no final norm, which all later drafts have."""
        names = checkpoint.tensors
        if not {"fc.weight", QUERY} <= set(names) or "norm.weight" in names:
            return False
        fc, query = names["fc.weight"].shape, names[QUERY].shape
        return len(fc) == len(query) == 2 and fc[1] == 2 * fc[0] and query[1] == fc[0]

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        place = place_of_draft(checkpoint)
        keys = checkpoint.keys(EagleKeys, *place)
        config = config_of(checkpoint, place, keys)
        tensors = {name: checkpoint.load(name) for name in checkpoint.tensors if name != EMBEDDING}
        vocab = keys.vocab_size or 0
        if EMBEDDING in checkpoint.tensors:
            vocab = checkpoint.shape(EMBEDDING, 2)[0]
            keys.check(vocab_size=vocab, draft_vocab_size=vocab)
        return Foreign(
            "eagle",
            replace(config, vocab_size=vocab),
            tensors,
            TargetFacts(None, config.hidden_size, vocab or None),
            needs_target="" if vocab else "how large the vocabulary is",
            notes=(f"the file does not state the draft's depth: {USUAL_DEPTH} is used",)
            * (keys.drafthead_depth is None),
            copies=checkpoint.present({"embedding": EMBEDDING}),
        )

    def written(self, export: Export) -> Written:
        config, stored = export.config, export.tensors
        self.refuse_options(config, {"window": (0,)})
        self.refuse_layers(config)
        if EMBEDDING not in stored:
            target = self.needed_target(export, "a copy of the target's embedding")
            stored[EMBEDDING] = export.copied(target.input_weight())
        described = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **layer_keys(config, config.num_layers, config.vocab_size),
            "bias": config.fc_bias,
            "qkv_bias": config.attention_bias,
            "use_cache": True,
            DEPTH: config.depth,
            "torch_dtype": export.dtype_name,
        }
        return Written(stored, described, PICKLE)

    def refuse_layers(self, config: EagleConfig) -> None:
        """Raise UserError for options of layers that the official configuration lacks."""
        if config.head_dim * config.num_attention_heads != config.hidden_size:
            raise self.cannot_express(
                f"head_dim {config.head_dim}: its reader divides the hidden size "
                f"{config.hidden_size} by {config.num_attention_heads} heads"
            )
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind != "default":
            raise self.cannot_express(f"rotary positions of the type {kind!r}")

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V]: `fc` joins feature and next token's embedding, outputs are fed back."""
        layers, states, rows = PlainLayers(config, tensors), probe.states, []
        following = torch.cat([probe.tokens[0], probe.chain])
        for _ in probe.chain:
            embeds = tensors[EMBEDDING][following[: len(states)]]
            hidden = layers.linear("fc", torch.cat([embeds, states], dim=-1))
            for layer in range(num_layers_of(tensors)):
                hidden = layers.decoder_layer(f"layers.{layer}.", hidden)
            rows.append(probe.target.project(hidden[-1]))
            states = torch.cat([states, hidden[-1:]])
        return torch.stack(rows)


def place_of_draft(checkpoint: Checkpoint) -> Place:
    """Return where the draft's configuration is, which older vLLM nests in another one.

    Raises UserError for a draft of fewer tokens, as only vLLM has it.
    """
    config = checkpoint.config
    if config.get("model_type") != "eagle" or not isinstance(config.get("model"), dict):
        return ()
    outer = checkpoint.keys(WrapperKeys)
    outer.check(truncated_vocab_size=outer.model.vocab_size or 0)
    return ("model",)


def config_of(checkpoint: Checkpoint, place: Place, keys: EagleKeys) -> EagleConfig:
    """Shape of the head, from the tensors as far as possible, else from the configuration."""
    tensors = checkpoint.tensors
    has_bias = "fc.bias" in tensors
    checkpoint.check_flag("bias", keys.bias, has_bias)
    num_layers = num_layers_of(tensors)
    keys.check(num_hidden_layers=num_layers)
    return EagleConfig(
        **layer_options(checkpoint, place, keys, "layers.0."),
        num_layers=num_layers,
        window=common_window(checkpoint.config_file, keys, num_layers),
        depth=keys.drafthead_depth or USUAL_DEPTH,
        fc_bias=has_bias,
    )
