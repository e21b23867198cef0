"""EAGLE-3 as its authors, SGLang, vLLM and Model-Optimizer store it: a Llama-like configuration.

The first layer is called `midlayer` (the authors, SGLang) or `layers.0` (vLLM, Model-Optimizer);
`d2t` holds for each guess the distance to its token.

**Layer ids.** Ours are the OUTPUT of a layer. The authors read the INPUT of layers 2, L/2 and L - 3
of L, which is our 1, L/2 - 1 and L - 4; readers use these when a file names no ids. Ids in a file
are ambiguous: Model-Optimizer and SpecForge write outputs, vLLM and llama.cpp read inputs beside
the other keys, and SGLang reads outputs under `eagle_config` (of DeepSeek's models only if the
first is 1). We write inputs there and, for SGLang, outputs here; a file with both is understood.
Of others we read ids as outputs if the first is 1, else as inputs, unless a key of ours decides.
"""

from collections.abc import Container
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.printing import shown
from drafthead.core.target.target import Target
from drafthead.heads.families.recurrent.eagle3 import Eagle3Config
from drafthead.heads.formats.base import (
    DEPTH,
    Export,
    Foreign,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    Written,
    base_name,
    register_format,
)
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import (
    Keys,
    LayerIds,
    Parts,
    Place,
    Reasons,
    Renaming,
    Size,
    TargetLayers,
    Token,
    only,
    our_taps,
)
from drafthead.heads.formats.layers import (
    FullLayerKeys,
    LayerKeys,
    PlainLayers,
    common_window,
    draft_vocabulary,
    layer_keys,
    layer_options,
    num_layers_of,
    spread_over,
    with_output_bias,
    without_output_bias,
)

IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "drafthead_layer_convention"  # a key of ours, which other readers ignore
OUTPUTS, INPUTS = "output of layer", "input of layer"
NORM_FLAGS = {"fc_norm": "each", "norm_before_fc": "joint"}
SIDE_TENSORS = ("d2t", "t2d")
EMBEDDINGS, MASK = "embed_tokens.weight", "mask_hidden"
MIDLAYER, FIRST = "midlayer.", "layers.0."
# Names of tensors by that of the first layer. After a `midlayer` SGLang's later layers call their
# first norm `hidden_norm`, as the first layer calls its second.
LATER_NORMS = {f"layers.{n}.hidden_norm.": f"layers.{n}.input_layernorm." for n in range(1, 128)}
NAMES = {MIDLAYER: Renaming({MIDLAYER: FIRST} | LATER_NORMS), FIRST: Renaming({})}
OTHER_NORMS = "our heads have norms in other places"
# Of these targets SGLang takes ids for inputs of layers, unless the first is 1.
TAKEN_FOR_INPUTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")


# Reading


class FlagKeys(Keys):
    """The keys that tell an EAGLE-3 layer from a Llama's, in whatever layout."""

    eagle_aux_hidden_state_layer_ids: LayerIds = Field(default=[])
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None


class EagleConfigKeys(Keys):
    """The keys that may be nested under `eagle_config`."""

    neutral: ClassVar[Reasons] = {"shown by the tensors": "parallel_draft_heads_num_layers"}
    eagle_aux_hidden_state_layer_ids: LayerIds = Field(default=[])
    norm_before_fc: bool | None = None
    # What our heads do not have.
    use_aux_hidden_state: Annotated[bool, only(True, why="fc.weight joins tapped layers")] = True
    use_input_layernorm_in_first_layer: Annotated[bool, only(True, why=OTHER_NORMS)] = True
    use_last_layernorm: Annotated[bool, only(True, why=OTHER_NORMS)] = True
    use_mtp_layernorm: Annotated[bool, only(False, why=OTHER_NORMS)] = False
    next_layer_regular: Annotated[bool, only(True, why="our later layers are Llama's")] = True
    parallel_draft_step: Annotated[
        int, only(0, 1, why="our heads draft a token a pass, or all of P-EAGLE's")
    ] = 1


class Eagle3Keys(FlagKeys):
    """The keys beside those of the layers, two of them ours."""

    neutral: ClassVar[Reasons] = {
        "of training": (
            "down_sample_ratio(_min)? draft_num_hidden_layers num_depths step_loss_decay ttt_length"
        ),
        "shown by the tensors": "bias parallel_drafting",
        "of the target": "target_model_type",
    }
    eagle_config: EagleConfigKeys = EagleConfigKeys()
    target_layer_ids: LayerIds = Field(default=[])  # of DeepSpec: hidden_states[id + 1]
    num_target_layers: TargetLayers | None = None
    target_model_name_or_path: str | None = None
    target_hidden_size: Size | None = None
    num_aux_hidden_states: Parts | None = None
    use_aux_norm: bool | None = None  # SGLang's older name of `fc_norm`
    drafthead_layer_convention: str | None = None
    drafthead_depth: Parts = Eagle3Config.depth


class MaskKeys(Keys):
    """The token that P-EAGLE reads at positions not yet known; vLLM's names come last."""

    mask_token_id: Token | None = None
    pard_token: Token | None = None
    ptd_token_id: Token | None = None


def mask_token_of(checkpoint: Checkpoint) -> int:
    """P-EAGLE's mask token; raises UserError when there is none, or several."""
    keys = checkpoint.keys(MaskKeys)
    given = {value for name in MaskKeys.model_fields if (value := getattr(keys, name)) is not None}
    if len(given) != 1:
        raise UserError(
            f"{checkpoint.config_file}: mask_token_id is "
            + (f"{shown(sorted(given))}, but must be one token" if given else "missing")
        )
    return given.pop()


def read_eagle3(
    checkpoint: Checkpoint,
    layers: Place,
    first_layer: str,
    taps: tuple[int, ...] | None,
    options: dict[str, Any],
) -> Foreign:
    """An EAGLE-3 head whose first layer's tensors begin with `first_layer`.

    `layers` leads to the configuration of the layers; `options` are the other fields of
    `Eagle3Config`. `taps` are in our numbers, or None where they depend on the target.
    """
    keys = checkpoint.keys(FullLayerKeys, *layers)
    tensors, vocab = checkpoint.tensors, keys.vocab_size
    shape = layer_options(checkpoint, layers, keys, first_layer)
    joined = checkpoint.shape("fc.weight", 2)[1]
    count = len(taps) if taps is not None else 3
    width = joined // max(count, 1)
    if width * count != joined:
        raise UserError(f"{checkpoint.weights}: fc.weight reads {joined} numbers of {count} layers")
    vocabulary = draft_vocabulary(checkpoint, vocab, keys.draft_vocab_size)
    frozen = options.get("embeddings") != "own" and width == shape["hidden_size"]
    found = {
        NAMES[first_layer].ours(name): checkpoint.load(name)
        for name in tensors
        if name not in SIDE_TENSORS and not (frozen and name == EMBEDDINGS)
    }
    if "lm_head.weight" not in found and keys.tie_word_embeddings:
        found["lm_head.weight"] = checkpoint.load(EMBEDDINGS)
    num_layers = num_layers_of(found)
    notes = count_layers(keys, first_layer, num_layers)
    head_config = Eagle3Config(
        **shape,
        vocab_size=vocab,
        num_layers=num_layers,
        window=common_window(checkpoint.config_file, keys, num_layers),
        target_hidden_size=width,
        taps=taps or (),
        tap_norm=tap_norm_of(tensors),
        qk_norm="layers.0.self_attn.q_norm.weight" in found,
        draft_vocab_size=len(vocabulary.get("d2t", ())),
        **options,
    )
    return Foreign(
        "eagle3",
        head_config,
        {**without_output_bias(found), **vocabulary},
        TargetFacts(base_name(checkpoint), width, vocab),
        taps=f"{', '.join(map(str, taps or ()))} ({OUTPUTS})",
        needs_target=""
        if taps is not None
        else "which layers it reads (they follow from how many layers the target has)",
        copies=checkpoint.present({"embedding": EMBEDDINGS} if frozen else {}),
        notes=notes,
    )


def count_layers(keys: LayerKeys, first_layer: str, num_layers: int) -> tuple[str, ...]:
    """Notes on the number of layers, which a `midlayer` alone shows to be 1.

    Configurations of its authors are copies of the target's, and their reader and SGLang ignore
    this key. Others build as many layers as it states: raises UserError when there are not as many.
    """
    if first_layer != MIDLAYER or num_layers > 1:
        keys.check(num_hidden_layers=num_layers)
    elif keys.num_hidden_layers not in (None, num_layers):
        return (f"num_hidden_layers says {keys.num_hidden_layers}, but the file holds one layer",)
    return ()


def tap_norm_of(names: Container[str]) -> Literal["none", "each", "joint"]:
    """Return which norms of EAGLE-3.1 come before the projection."""
    if "fc_norm.0.weight" in names:
        return "each"
    return "joint" if "input_norm.weight" in names else "none"


def check_norms(
    checkpoint: Checkpoint, keys: FlagKeys, config: Eagle3Config, optional: bool
) -> None:
    """Raise UserError when flags and tensors disagree on the norms before the projection.

    A missing flag means false, or, if it is `optional`, nothing.
    """
    stated_flags: list[tuple[Keys, str, str]] = [(keys, k, n) for k, n in NORM_FLAGS.items()]
    if isinstance(keys, Eagle3Keys):
        stated_flags += [(keys, "use_aux_norm", "each")]
        stated_flags += [(keys.eagle_config, "norm_before_fc", "joint")]
    for holder, key, norm in stated_flags:
        stated = getattr(holder, key)
        if stated is None and not optional:
            stated = False
        checkpoint.check_flag(key, stated, config.tap_norm == norm)


def default_inputs(num_layers: int) -> tuple[int, ...]:
    """The layers whose input EAGLE-3's authors read, in order; below 7 layers some coincide."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def stated_taps(
    checkpoint: Checkpoint, keys: Eagle3Keys, target: TargetFacts
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Our layers for the ids of a configuration, in any convention, and notes on that.

    Raises UserError for ids in two conventions, and where the target's layers must be known.
    """
    known = keys.num_target_layers or target.num_layers
    outer = tuple(keys.eagle_aux_hidden_state_layer_ids)
    nested = tuple(keys.eagle_config.eagle_aux_hidden_state_layer_ids)
    layers, before = nested or outer, tuple(layer - 1 for layer in outer)
    if (outer and nested not in ((), outer, before)) or (layers and keys.target_layer_ids):
        raise UserError(
            f"{checkpoint.config_file}: {IDS} is {list(outer or nested)}, but other layers are "
            "named too"
        )
    if keys.target_layer_ids:
        if known is None:
            raise UserError(f"{checkpoint.config_file}: num_target_layers is missing")
        return our_taps(keys.target_layer_ids, known), ()
    if outer and nested == before:  # inputs there, outputs here
        return nested, ()
    if not layers:
        if known is None:
            return None, ()
        taps = tuple(layer - 1 for layer in default_inputs(known))
        return taps, ("no layers are named: those of EAGLE-3's authors are used",)
    convention, notes = keys.drafthead_layer_convention, []
    if convention not in (OUTPUTS, INPUTS):
        convention = OUTPUTS if layers[0] == 1 else INPUTS
        notes.append(
            f"{list(layers)} are read as {convention}, as in SGLang: the file is ambiguous"
        )
    if convention == INPUTS:
        layers = tuple(layer - 1 for layer in layers)
    return layers, tuple(notes)


class Eagle3Files(WritableFormat):
    """The common part of the two ways to name the first layer."""

    families = ("eagle3",)
    first_layer: str

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return (
            self.first_layer + "hidden_norm.weight" in checkpoint.tensors
            and "fc.weight" in checkpoint.tensors
            and "speculators_model_type" not in checkpoint.config
        )

    def reads_embeddings(self, checkpoint: Checkpoint) -> bool:
        """Tell whether readers use embeddings from the file although the target's would fit."""
        return False

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head, with the layers that its readers would tap."""
        keys = checkpoint.keys(Eagle3Keys)
        taps, notes = stated_taps(checkpoint, keys, target)
        options = {
            "depth": keys.drafthead_depth,
            "ttt_steps": min(keys.drafthead_depth, Eagle3Config.ttt_steps),
            "norm_before_residual": keys.norm_before_residual,
            "norm_feedback": keys.norm_output,
            "embeddings": "own" if self.reads_embeddings(checkpoint) else "target",
            "mask_token": mask_token_of(checkpoint) if MASK in checkpoint.tensors else None,
        }
        found = read_eagle3(checkpoint, (), self.first_layer, taps, options)
        keys.check(target_hidden_size=found.target.hidden_size)
        if taps is not None:
            keys.check(num_aux_hidden_states=len(taps))
        check_norms(checkpoint, keys, found.config, optional=True)
        name = found.target.name or keys.target_model_name_or_path
        facts = replace(found.target, name=name, num_layers=keys.num_target_layers)
        return replace(found, notes=(*found.notes, *notes), target=facts)

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V], with one pass of the layers over everything so far for each step."""
        named = {NAMES[self.first_layer].ours(name): t for name, t in tensors.items()}
        return replayed(config, config, named, probe)

    def refuse_taps(self, config: Eagle3Config, num_layers: int | None) -> None:
        """Raise UserError for taps that are the input of no layer."""
        if num_layers is not None and max(config.taps) >= num_layers - 1:
            raise self.cannot_express(
                f"head.taps {list(config.taps)}: it reads inputs of layers, and the output of the "
                f"last layer, {num_layers - 1}, is the input of none"
            )


# Arithmetic


def replayed(
    layer_config: dict[str, Any], flags: dict[str, Any], tensors: Tensors, probe: Probe
) -> torch.Tensor:
    """EAGLE-3's logits [K, V], computed from tensors whose layers are called `layers`."""
    layers = PlainLayers(layer_config, tensors)
    num_taps = len(probe.features.taps)
    states = mixed(layers, [tap[0] for tap in probe.features.taps])
    embeds, rows = embedded(tensors, probe, probe.tokens[0]), []
    for token in probe.chain:
        output = run(layers, flags, embeds, states)[-1:]
        normed = layers.norm("norm", output)
        rows.append(normed @ tensors["lm_head.weight"].T)
        fed, read = normed if flags.get("norm_output") else output, token[None]
        if MASK in tensors:
            fed = mixed(layers, list(tensors[MASK][0].chunk(num_taps, dim=-1)))
            read = torch.full_like(read, flags["mask_token_id"])
        states = torch.cat([states, fed])
        embeds = torch.cat([embeds, embedded(tensors, probe, read)])
    return spread_over(torch.cat(rows), tensors, probe.target.vocab_size)


def embedded(tensors: Tensors, probe: Probe, ids: torch.Tensor) -> torch.Tensor:
    """Embeddings [T, D] of ids [T], from the file if it has any, else the target's."""
    table = tensors.get(EMBEDDINGS)
    return probe.target.embed(ids) if table is None else table[ids]


def mixed(layers: PlainLayers, taps: list[torch.Tensor]) -> torch.Tensor:
    """States [T, D] from taps [T, D] each, with the norms that the file has."""
    if "fc_norm.0.weight" in layers.tensors:
        taps = [layers.norm(f"fc_norm.{index}", tap) for index, tap in enumerate(taps)]
    joined = torch.cat(taps, dim=-1)
    if "input_norm.weight" in layers.tensors:
        joined = layers.norm("input_norm", joined)
    return layers.linear("fc", joined)


def run(
    layers: PlainLayers, flags: dict[str, Any], embeds: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """All layers over embeddings and states [T, D], causally: [T, D]."""
    positions = torch.arange(len(states))
    mask = torch.ones(len(states), len(states), dtype=torch.bool).tril()
    if layers.config.get("use_sliding_window"):
        mask = mask.triu(1 - layers.config["sliding_window"])
    hidden = states
    for index in range(num_layers_of(layers.tensors)):
        layer = f"layers.{index}."
        normed = layers.norm(layer + "input_layernorm", embeds if index == 0 else hidden)
        if index == 0:
            features = layers.norm(layer + "hidden_norm", hidden)
            normed = torch.cat([normed, features], dim=-1)
            hidden = features if flags.get("norm_before_residual") else hidden
        hidden = hidden + layers.attention(layer, normed, positions, normed, positions, mask)
        hidden = layers.mlp(layer, hidden)
    return hidden


# Writing


def common_config(export: Export) -> dict[str, Any]:
    """The configuration for both readers, without the layer ids."""
    config: Eagle3Config = export.config
    other_width = config.target_hidden_size != config.hidden_size
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_keys(config, config.num_layers, config.vocab_size),
        **norm_flags(config),
        "mlp_bias": False,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        **({"target_hidden_size": config.target_hidden_size} if other_width else {}),
        **({"base_model_name_or_path": name} if (name := export.facts.name) else {}),
        DEPTH: config.depth,
    }


# What SGLang's EAGLE-3 lacks: its code knows no such option.
PLAIN = {
    "norm_before_residual": (False,),
    "qk_norm": (False,),
    "attention_bias": (False,),
    "mask_token": (None,),
    "window": (0,),
}


@register_format
class Eagle3Sglang(Eagle3Files):
    """The authors' own names, which SGLang reads: the first layer is `midlayer`.

    SGLang calls the first norm of later layers `hidden_norm`, too. Embeddings are the target's
    unless the head has another width.
    """

    name = "eagle3-sglang"
    readers = "SGLang; with one layer vLLM, llama.cpp, without norms SafeAILab/EAGLE"
    first_layer = MIDLAYER

    def written(self, export: Export) -> Written:
        config: Eagle3Config = export.config
        self.refuse_options(config, PLAIN)
        if config.embeddings == "own" and config.hidden_size == config.target_hidden_size:
            raise self.cannot_express("head.embeddings 'own'")
        self.refuse_taps(config, export.facts.num_layers)
        self.refuse_misread_taps(config, export.target)
        ids = {IDS: list(config.taps), "use_aux_hidden_state": True}
        described = {
            **common_config(export),
            IDS: [layer + 1 for layer in config.taps],
            "eagle_config": ids,
            CONVENTION: OUTPUTS,
        }
        return Written(NAMES[MIDLAYER].written(export.tensors), described)

    def refuse_misread_taps(self, config: Eagle3Config, target: Target | None) -> None:
        """Raise UserError for taps that SGLang would not read as ours."""
        taps = f"head.taps {list(config.taps)}"
        if len(config.taps) == 1 and config.hidden_size == config.target_hidden_size:
            raise self.cannot_express(f"{taps}: SGLang leaves fc out for one tap")
        kind = "" if target is None else getattr(target.config, "model_type", "")
        if kind in TAKEN_FOR_INPUTS and config.taps[0] != 1:
            raise self.cannot_express(
                f"{taps} on {kind}: of this target SGLang reads them as others unless the first is "
                "1"
            )


def norm_flags(config: Eagle3Config) -> dict[str, bool]:
    """The keys of the norms of EAGLE-3.1."""
    flags = {key: config.tap_norm == norm for key, norm in NORM_FLAGS.items()}
    return {"norm_output": config.norm_feedback, **flags}


# The class of vLLM whose layers norm queries and keys.
LIKE_QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}


@register_format
class Eagle3Vllm(Eagle3Files):
    """Layers by number, as vLLM and Model-Optimizer name them, with the norms of EAGLE-3.1."""

    name = "eagle3-vllm"
    readers = "vLLM; with one layer llama.cpp"
    first_layer = FIRST

    def reads_embeddings(self, checkpoint: Checkpoint) -> bool:
        """vLLM uses them where there are any."""
        return EMBEDDINGS in checkpoint.tensors

    def written(self, export: Export) -> Written:
        config: Eagle3Config = export.config
        self.refuse_options(config, {"mask_token": (None,), "window": (0,)})
        self.refuse_taps(config, export.facts.num_layers)
        ids = [layer + 1 for layer in config.taps]
        described = {
            **common_config(export),
            **(LIKE_QWEN3 if config.qk_norm else {}),
            "norm_before_residual": config.norm_before_residual,
            IDS: ids,
            "eagle_config": {IDS: ids, "use_aux_hidden_state": True},
            CONVENTION: INPUTS,
        }
        return Written(with_output_bias(export.tensors), described)
