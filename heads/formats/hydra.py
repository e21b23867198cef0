"""Hydra and Hydra++ (Ankner et al., 2024): `hydra_lm_head.pt`.

After its first block a head is one module in the official code, which is stored once for each time
it is applied. Options of the prefix layer of Hydra++ that its tensors do not show are the target's.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

import torch
from torch.nn.functional import silu

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.heads.families.sequential.hydra import HydraConfig
from drafthead.heads.formats.base import (
    Export,
    Foreign,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    Written,
    base_name,
    refuse_others,
    register_format,
)
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import Count, Keys, only
from drafthead.heads.formats.layers import PlainLayers
from drafthead.heads.layers.decoder_layer import LayerConfig

PREFIX = "prefix_embeding_layer."  # the official spelling
LAYER = PREFIX + "layers.0."
EMBEDDING = "input_embed_fn.weight"
# Written by the official code and read by nobody.
UNUSED = (PREFIX + "embed_tokens.weight", LAYER + "self_attn.rotary_emb.inv_freq")
LAYER_TENSORS = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def block_name(config: HydraConfig, head: int, block: int) -> str:
    """A block's name: its place among the modules of its head."""
    place = 2 * block + 1 if config.prefix_layer else block  # Hydra++ has a dropout before each
    return f"hydra_mlp.{head}.{place}"


def output_name(config: HydraConfig, head: int) -> str:
    """The name of a head's output, which in Hydra++ comes after a dropout."""
    return f"hydra_lm_head.{head}" + (".1" if config.prefix_layer else "")


def renamed(config: HydraConfig) -> dict[str, str]:
    """The file's names of the tensors of our head, by our names."""
    modules = {}
    for head in range(config.num_heads):
        ours, first = f"branches.{head}", block_name(config, head, 0)
        modules[f"{ours}.first"] = f"{first}.linear"
        if config.grounded:
            modules[f"{ours}.shortcut"] = f"{first}.res_connection"
        if config.num_blocks > 1:
            modules[f"{ours}.block"] = f"{block_name(config, head, 1)}.linear"
        modules[f"{ours}.output"] = output_name(config, head)
    found = {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }
    if config.prefix_layer:
        found |= {f"prefix.layer.{name}": LAYER + name for name in LAYER_TENSORS}
        found["prefix.norm.weight"] = PREFIX + "norm.weight"
    return found


def repeated(config: HydraConfig) -> dict[str, str]:
    """Names of tensors, each with the name of the tensor that it must equal."""
    return {
        f"{block_name(config, head, block)}.linear.{kind}": (
            f"{block_name(config, head, 1)}.linear.{kind}"
        )
        for head in range(config.num_heads)
        for block in range(2, config.num_blocks)
        for kind in ("weight", "bias")
    }


class HydraKeys(Keys):
    """The official keys."""

    hidden_state_offset: Annotated[
        int, only(0, why="our heads read the last hidden state, not an earlier layer's")
    ] = 0
    hydra_head_arch: Annotated[
        str, only("mlp", "prefix-mlp", why="our heads are those of Hydra and Hydra++")
    ] = "mlp"
    hydra_num_heads: Count | None = None
    hydra_num_layers: Count | None = None
    grounded_heads: bool | None = None


@register_format
class Hydra(WritableFormat):
    """The official file: heads, a copy of the target's embedding, and perhaps a prefix layer."""

    name = "hydra"
    families = ("hydra",)
    readers = "Hydra"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(name.startswith("hydra_mlp.0.") for name in checkpoint.tensors)

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The heads; the embedding is a copy of the target's, unused tensors are ignored."""
        keys = checkpoint.keys(HydraKeys)
        config = config_of(checkpoint, keys)
        for name, other in repeated(config).items():
            if not checkpoint.same(name, other):
                raise UserError(
                    f"{checkpoint.weights}: {name} differs from {other}, its repetition"
                )
        theirs = renamed(config)
        refuse_others(checkpoint, [*theirs.values(), *repeated(config), EMBEDDING, *UNUSED])
        size, vocab = config.hidden_size, config.vocab_size
        if UNUSED[0] in checkpoint.tensors and checkpoint.shape(UNUSED[0], 2) != (vocab, size):
            raise UserError(f"{checkpoint.weights}: {UNUSED[0]} is no embedding of {vocab} tokens")
        copies = checkpoint.present({"embedding": EMBEDDING})
        return Foreign(
            "hydra",
            config,
            {name: checkpoint.load(other) for name, other in theirs.items()},
            TargetFacts(base_name(checkpoint), size, vocab),
            needs_target="the shape of its prefix layer" if config.prefix_layer else "",
            notes=("its embedding is ignored: the target's own is used",) * len(copies),
            copies=copies,
        )

    def written(self, export: Export) -> Written:
        config, tensors = export.config, export.tensors
        target = self.needed_target(export, "a copy of the target's embedding")
        self.refuse_other_layer(config, target)
        embedding = export.copied(target.input_weight())
        stored = {theirs: tensors[name] for name, theirs in renamed(config).items()}
        stored |= {name: stored[other] for name, other in repeated(config).items()}
        stored[EMBEDDING] = embedding
        if config.prefix_layer:
            stored[UNUSED[0]] = embedding
            stored[UNUSED[1]] = inverse_frequencies(config)
        described = {
            "base_model_name_or_path": export.facts.name,
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_blocks,
            "hydra_head_arch": "prefix-mlp" if config.prefix_layer else "mlp",
            "grounded_heads": config.grounded,
            "hidden_state_offset": 0,
        }
        return Written(stored, described, "hydra_lm_head.pt")

    def refuse_other_layer(self, config: HydraConfig, target: Target) -> None:
        """Raise UserError for a prefix layer of another shape than the target's layers."""
        theirs = HydraConfig(hidden_size=config.hidden_size).like(target)
        for name in [field.name for field in fields(LayerConfig)] if config.prefix_layer else ():
            if getattr(config, name) != getattr(theirs, name):
                raise self.cannot_express(
                    f"{name} {getattr(config, name)} of the prefix layer: its reader takes the "
                    f"target's {getattr(theirs, name)}"
                )

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V]: the prefix layer over all positions, then heads that read the path."""
        shape = HydraConfig(
            num_blocks=config["hydra_num_layers"],
            prefix_layer=config["hydra_head_arch"] == "prefix-mlp",
            grounded=config["grounded_heads"],
        )
        hidden = probe.states
        if shape.prefix_layer:
            hidden = prefix_pass(hidden, tensors, probe.target)
        modules = PlainLayers({"rms_norm_eps": None, "head_dim": None}, tensors)
        path, rows = [hidden[-1]], []
        for head, token in enumerate(probe.before):
            path.append(tensors[EMBEDDING][token])
            given = torch.cat(path) if shape.grounded else hidden[-1]
            name = block_name(shape, head, 0)
            straight = modules.linear(f"{name}.res_connection", given) if shape.grounded else given
            state = straight + silu(modules.linear(f"{name}.linear", given))
            for block in range(1, shape.num_blocks):
                name = block_name(shape, head, block)
                state = state + silu(modules.linear(f"{name}.linear", state))
            rows.append(modules.linear(output_name(shape, head), state))
        return torch.stack(rows)


def config_of(checkpoint: Checkpoint, keys: HydraKeys) -> HydraConfig:
    """Shape of the heads, from the tensors; some options of the prefix layer stay open."""
    names = checkpoint.tensors
    prefix_layer = LAYER + LAYER_TENSORS[0] in names
    config = HydraConfig(
        num_heads=count(names, r"hydra_lm_head\.(\d{1,3})\.[\d.]*weight"),
        num_blocks=count(names, r"hydra_mlp\.0\.(\d{1,3})\.linear\.weight"),
        prefix_layer=prefix_layer,
    )
    first = f"{block_name(config, 0, 0)}.linear.weight"
    size, width = checkpoint.shape(first, 2)
    vocab = checkpoint.shape(f"{output_name(config, 0)}.weight", 2)[0]
    config = replace(config, grounded=width != size, hidden_size=size, vocab_size=vocab)
    keys.check(hydra_num_heads=config.num_heads, hydra_num_layers=config.num_blocks)
    checkpoint.check_flag("grounded_heads", keys.grounded_heads, config.grounded)
    if not prefix_layer:
        return config
    inner = checkpoint.shape(LAYER + "mlp.gate_proj.weight", 2)[0]
    return replace(config, intermediate_size=inner)


def count(names: Iterable[str], pattern: str) -> int:
    """Return how many numbers match the group of the pattern."""
    # At least 1: if there is none, the error names the missing tensor of the first.
    return len({m[1] for name in names if (m := re.fullmatch(pattern, name))}) or 1


def inverse_frequencies(config: HydraConfig) -> torch.Tensor:
    """The rotary frequencies [head_dim / 2] of the prefix layer, as the official buffer."""
    theta = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
    places = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    return (theta ** (-places / config.head_dim)).float()


def prefix_pass(hidden: torch.Tensor, tensors: Tensors, target: Target) -> torch.Tensor:
    """Hidden states [T, D] after the prefix layer, shaped as the target's layers, and its norm."""
    layers = PlainLayers(asdict(HydraConfig().like(target)), tensors)
    return layers.norm(PREFIX + "norm", layers.decoder_layer(LAYER, hidden))
