"""The common parts of DFlash, DSpark and their `speculators` form: one block in one pass.

The formats differ in layer numbers, in names of modules and in configuration keys. Tensors of the
layers have the same names in all of them.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.families.parallel import ParallelConfig
from drafthead.heads.formats.base import Foreign, Probe, TargetFacts, base_name
from drafthead.heads.formats.files import Checkpoint
from drafthead.heads.formats.keys import Count, Keys, Slots, Vocabulary
from drafthead.heads.formats.layers import (
    FullLayerKeys,
    PlainLayers,
    Tensors,
    draft_vocabulary,
    layer_options,
    num_layers_of,
    spread_over,
    without_output_bias,
)

# The formats' names and ours, where they differ.
PARTS = {
    "lm_head.": "output.",
    "markov_head.markov_w1.": "correction.embed.",
    "markov_head.markov_w2.": "correction.output.",
    "markov_head.gate_proj.": "correction.gate.",
    "markov_head.joint_proj.": "correction.joint.",
    "confidence_head.proj.": "confidence.",
}
PREFIX = "transformer."
CORRECTIONS = {"vanilla": "markov", "gated": "gated", "rnn": "recurrent"}
COPIES = {"embed_tokens.weight": "embedding", "lm_head.weight": "output"}


# Reading


class BlockKeys(Keys):
    """The keys of DFlash and DSpark, beside those of their layers."""

    block_size: Slots
    draft_vocab_size: Vocabulary | None = None
    enable_confidence_head: bool | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: Count | None = None


def read_block(
    checkpoint: Checkpoint,
    taps: tuple[int, ...],
    mask_token: int,
    root_predicts: bool,
    layers: Mapping[str, Any],
) -> Foreign:
    """A block-parallel head of any of the formats.

    `taps` are in our numbers; `layers` is the configuration of the layers, which may be nested. A
    full output head and full embeddings in the file are copies of the target's.
    """
    keys, shape = checkpoint.keys(BlockKeys), checkpoint.keys(FullLayerKeys, layers)
    vocab = shape.vocab_size
    options = layer_options(checkpoint, layers, shape, "layers.0.")
    hidden = options["hidden_size"]
    vocabulary = draft_vocabulary(checkpoint, vocab, keys.draft_vocab_size)
    copies = {
        kind: checkpoint.load(name)
        for name, kind in COPIES.items()
        if name in checkpoint.tensors and not (kind == "output" and vocabulary)
    }
    left_out = {"d2t", "t2d", *(name for name, kind in COPIES.items() if kind in copies)}
    found = {
        our_name(name): checkpoint.load(name) for name in checkpoint.tensors if name not in left_out
    }
    num_layers = num_layers_of(checkpoint.tensors)
    shape.check(num_hidden_layers=num_layers)
    config = ParallelConfig(
        **options,
        taps=taps,
        tap_norm=False,
        num_layers=num_layers,
        block_size=keys.block_size,
        root_predicts=root_predicts,
        causal=False,
        mask_token=mask_token,
        vocab_size=vocab,
        draft_vocab_size=len(vocabulary.get("d2t", ())),
        **correction_of(checkpoint, keys, hidden),
    )
    facts = TargetFacts(base_name(checkpoint), hidden, vocab)
    tensors = {**without_output_bias(found), **vocabulary}
    return Foreign("parallel", config, tensors, facts, copies=copies)


def our_name(name: str) -> str:
    """Our name of a tensor in the file."""
    for theirs, ours in PARTS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return PREFIX + name


def correction_of(checkpoint: Checkpoint, keys: BlockKeys, hidden_size: int) -> dict[str, Any]:
    """The correction and confidence fields of `ParallelConfig`, from the tensors."""
    names, found = checkpoint.tensors, {"correction": "none", "correction_rank": 1}
    confident = "confidence_head.proj.weight" in names
    if keys.enable_confidence_head not in (None, confident):
        raise UserError(
            f"{checkpoint.weights}: enable_confidence_head is {not confident}, but its tensors say "
            "otherwise"
        )
    if "markov_head.markov_w1.weight" in names:
        rank = checkpoint.shape("markov_head.markov_w1.weight", 2)[1]
        keys.check(markov_rank=rank)
        found = {"correction": CORRECTIONS[keys.markov_head_type], "correction_rank": rank}
    if not confident:
        return {**found, "confidence_weight": 0.0}
    reads = checkpoint.shape("confidence_head.proj.weight", 2)[1]
    return {**found, "confidence_weight": 1.0, "confidence_reads_token": reads > hidden_size}


# Writing


def refuse_unlike(name: str, config: ParallelConfig, wanted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UserError for the first option that the formats lack or that is not in `wanted`."""
    always = {"tap_norm": (False,), "root_feature": (False,), "causal": (False,)}
    for option, values in {**always, **wanted}.items():
        if (value := getattr(config, option)) not in values:
            raise UserError(f"{name} cannot express head.{option} {value!r}")
    if config.mask_token is None:
        raise UserError(
            f"{name} cannot express head.mask_token null, a learned mask: its reader uses the "
            "embedding of a token"
        )


def their_tensors(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors [...] of our head under the formats' names."""
    return {their_name(name): tensor for name, tensor in tensors.items()}


def their_name(name: str) -> str:
    """The formats' name of one of our tensors."""
    for theirs, ours in PARTS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name.removeprefix(PREFIX)


def correction_keys(config: ParallelConfig) -> dict[str, Any]:
    """The configuration keys of DSpark's correction and confidence."""
    kinds = {ours: theirs for theirs, ours in CORRECTIONS.items()}
    corrected = config.correction != "none"
    confident = config.confidence_weight > 0
    keys: dict[str, Any] = {
        "markov_rank": config.correction_rank if corrected else 0,
        "enable_confidence_head": confident,
        "confidence_head_with_markov": corrected and confident and config.confidence_reads_token,
    }
    return {**keys, "markov_head_type": kinds[config.correction]} if corrected else keys


# Arithmetic


def replayed(
    layer_config: dict[str, Any],
    config: dict[str, Any],
    stored: Tensors,
    probe: Probe,
    mask_token: int,
    root_predicts: bool,
) -> torch.Tensor:
    """The readers' logits [K, V], computed from stored tensors under their names."""
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
    layers = PlainLayers(layer_config, tensors)
    features = torch.cat([tap[0] for tap in probe.features.taps], dim=-1)  # [T, taps x D]
    context = layers.norm("hidden_norm", layers.linear("fc", features))
    size, length = config["block_size"], len(context)
    ids = torch.full((size,), mask_token)
    ids[0] = probe.tokens[0, -1]
    hidden, slots = probe.target.embed(ids), torch.arange(length, length + size)
    places = torch.arange(length + size)
    mask = torch.ones(size, length + size, dtype=torch.bool)
    for index in range(num_layers_of(tensors)):
        layer = f"layers.{index}."
        normed = layers.norm(layer + "input_layernorm", hidden)
        seen = torch.cat([context, normed])
        hidden = hidden + layers.attention(layer, seen, places, normed, slots, mask)
        hidden = layers.mlp(layer, hidden)
    hidden = layers.norm("norm", hidden)[0 if root_predicts else 1 :]
    head = tensors.get("lm_head.weight")
    logits = probe.target.project(hidden) if head is None else hidden @ head.T
    before = torch.cat([probe.tokens[0, -1:], probe.chain[:-1]])
    logits = logits + markov_bias(layers, config, before, hidden)
    return spread_over(logits, tensors, probe.target.vocab_size)


def markov_bias(
    layers: PlainLayers, config: dict[str, Any], before: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """DSpark's correction [K, V] of logits for slots with hidden [K, D] after tokens [K]."""
    if "markov_head.markov_w1.weight" not in layers.tensors:
        return torch.zeros(())
    codes = layers.tensors["markov_head.markov_w1.weight"][before]  # [K, rank]
    kind = config.get("markov_head_type", "vanilla")
    if kind == "gated":
        gate = layers.linear("markov_head.gate_proj", torch.cat([hidden, codes], dim=-1))
        codes = gate.sigmoid() * codes
    elif kind == "rnn":
        state, found = torch.zeros_like(codes[0]), []
        for code, slot in zip(codes, hidden, strict=True):
            joint = layers.linear("markov_head.joint_proj", torch.cat([state, code, slot]))
            share, change, out = joint.chunk(3)
            state = share.sigmoid() * state + (1 - share.sigmoid()) * change.tanh()
            found.append(out.tanh())
        codes = torch.stack(found)
    return layers.linear("markov_head.markov_w2", codes)
