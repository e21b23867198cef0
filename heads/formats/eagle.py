"""EAGLE-1 and EAGLE-2 (Li et al., 2024): one layout of weights, the trees make the difference.

`fc` over embedding and feature, then Llama layers of which the first has no norm; no final norm and
no output head. The embedding in the file is a copy of the target's.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.heads.base import DraftHead
from drafthead.heads.draft_layers import ROPE_TYPES
from drafthead.heads.eagle import EagleConfig
from drafthead.heads.errors import UserError
from drafthead.heads.formats.arithmetic import LayerShape, decoder_layer, projected
from drafthead.heads.formats.base import (
    Foreign,
    Probe,
    TargetFacts,
    WritableFormat,
    all_tensors,
    check_claims,
    dtype_name,
    register_format,
    wanted,
    write_config,
)
from drafthead.heads.formats.files import CONFIG_FILE, Checkpoint, read_json
from drafthead.heads.target import Target

QUERY, EMBEDDING = "layers.0.self_attn.q_proj.weight", "embed_tokens.weight"
DEPTH = 5  # tokens drafted behind the root, of which the file says nothing: the official default


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
        """All layers; the embedding is compared with the target's when that is at hand."""
        checkpoint = replace(checkpoint, config=unwrapped(checkpoint.config))
        config = config_of(checkpoint)
        tensors = {name: checkpoint.load(name) for name in checkpoint.tensors if name != EMBEDDING}
        copies, notes = {}, []
        vocab = checkpoint.integer("vocab_size", 0)
        if EMBEDDING in checkpoint.tensors:
            vocab = checkpoint.shape(EMBEDDING, 2)[0]
            check_claims(checkpoint, vocab_size=vocab)
            copies["embedding"] = checkpoint.load(EMBEDDING)
            notes.append("its embedding is left out: the target's own is read")
        return Foreign(
            "eagle",
            replace(config, vocab_size=vocab),
            tensors,
            TargetFacts(None, config.hidden_size, vocab or None),
            needs_target="" if vocab else "how large the vocabulary is",
            notes=(*notes, f"the depth of its drafts is not told: {DEPTH} is taken"),
            copies=copies,
        )

    def write(
        self, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
    ) -> None:
        """Weights with a copy of the target's embedding, and a Llama configuration."""
        config = head.config
        refuse_inexpressible(config)
        every = torch.arange(config.vocab_size)
        embedding = wanted(target, self.name, "a copy of the target's embedding").embed(every)
        stored = {name: t.contiguous() for name, t in head.state_dict().items()}
        dtype = stored["fc.weight"].dtype
        stored[EMBEDDING] = embedding.detach().to(dtype).contiguous()
        torch.save(stored, folder / "pytorch_model.bin")
        write_config(folder, described(head))

    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """Each position mixes its feature with the next token's embedding; outputs are fed back."""
        tensors = all_tensors(folder)
        config = read_json(folder / CONFIG_FILE)
        num_heads = config["num_attention_heads"]
        shape = LayerShape(
            num_heads,
            config["num_key_value_heads"],
            config["hidden_size"] // num_heads,
            config["rms_norm_eps"],
            config["rope_theta"],
        )
        assert probe.features.last is not None
        states, rows = probe.features.last[0].float(), []
        following = torch.cat([probe.tokens[0], probe.chain])
        for _ in probe.chain:
            embeds = tensors[EMBEDDING][following[: len(states)]].float()
            hidden = projected(torch.cat([embeds, states], dim=-1), tensors, "fc")
            for layer in range(config["num_hidden_layers"]):
                hidden = decoder_layer(hidden, tensors, f"layers.{layer}", shape)
            rows.append(probe.target.project(hidden[-1]))
            states = torch.cat([states, hidden[-1:]])
        return torch.stack(rows)


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """The draft's configuration: older vLLM wants it inside another one."""
    inner = config.get("model")
    return inner if config.get("model_type") == "eagle" and isinstance(inner, dict) else config


def config_of(checkpoint: Checkpoint) -> EagleConfig:
    """Shape of the head: tensors first, the configuration for what they do not tell."""
    tensors = checkpoint.tensors
    size = checkpoint.shape("fc.weight", 2)[0]
    queries, keys = (
        checkpoint.shape(f"layers.0.self_attn.{part}_proj.weight", 2)[0] for part in "qk"
    )
    num_heads = checkpoint.integer("num_attention_heads")
    kv_heads = checkpoint.integer("num_key_value_heads", num_heads)
    head_dim = checkpoint.integer("head_dim", size // max(1, num_heads))
    if (num_heads * head_dim, kv_heads * head_dim) != (queries, keys) or min(queries, keys) < 1:
        where = checkpoint.weights.parent / CONFIG_FILE
        raise UserError(
            f"{where}: {num_heads} attention heads, {kv_heads} of keys, do not make {queries} "
            f"queries and {keys} keys"
        )
    layers = {int(m[1]) for name in tensors if (m := re.match(r"layers\.(\d{1,3})\.", name))}
    has_bias = "fc.bias" in tensors
    if "bias" in checkpoint.config and checkpoint.flag("bias") != has_bias:
        raise UserError(f"{checkpoint.weights}: bias is {not has_bias}, but fc.bias says otherwise")
    if checkpoint.config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{checkpoint.weights}: only the activation silu is supported")
    check_claims(checkpoint, hidden_size=size, num_hidden_layers=len(layers))
    return EagleConfig(
        hidden_size=size,
        intermediate_size=checkpoint.shape("layers.0.mlp.gate_proj.weight", 2)[0],
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=QUERY.replace("weight", "bias") in tensors,
        rms_norm_eps=checkpoint.number("rms_norm_eps", 1e-6),
        max_position_embeddings=checkpoint.integer("max_position_embeddings", 2048),
        rope_parameters=rope_of(checkpoint),
        num_layers=len(layers),
        depth=DEPTH,
        fc_bias=has_bias,
    )


def rope_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Rotary base and stretching, under the keys of transformers 4 or 5; the usual base is 10000.

    Raises UserError for a kind of stretching that is not known.
    """
    config = checkpoint.config
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"{checkpoint.weights.parent / CONFIG_FILE}: rope_scaling is {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta") or checkpoint.number("rope_theta", 10000.0)
    known = kind in ROPE_TYPES and type(theta) in (int, float) and 0 < theta < float("inf")
    if not known:
        raise UserError(
            f"{checkpoint.weights.parent / CONFIG_FILE}: rotary positions of type {kind!r} with "
            f"base {theta!r} are not supported"
        )
    rest = {key: value for key, value in given.items() if key not in ("type", "rope_type")}
    return {**rest, "rope_type": kind, "rope_theta": float(theta)}


def refuse_inexpressible(config: EagleConfig) -> None:
    """Raise UserError for what the official reader cannot be told."""
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise UserError(
            f"eagle cannot express head_dim {config.head_dim}: its reader divides the hidden size "
            f"{config.hidden_size} by {config.num_attention_heads} heads"
        )
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind != "default":
        raise UserError(f"eagle cannot express rotary positions of the type {kind!r}")


def described(head: DraftHead) -> dict[str, Any]:
    """The configuration, with the rotary base under the keys of transformers 4 and 5."""
    config = head.config
    theta = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": config.vocab_size,
        "bias": config.fc_bias,
        "qkv_bias": config.attention_bias,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": dtype_name(head),
    }
