"""The common parts of DFlash, DSpark and their `speculators` form: one block in one pass.

The formats differ in layer numbers, in names of modules and in configuration keys. Tensors of the
layers have the same names in all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch

from drafthead.core.errors import UserError
from drafthead.core.printing import shown
from drafthead.heads.families.parallel.head import ParallelConfig
from drafthead.heads.formats.base import (
    Foreign,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    base_name,
)
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import (
    Count,
    Keys,
    LayerIds,
    Place,
    Reasons,
    Renaming,
    Size,
    Slots,
    TargetLayers,
    Token,
    Vocabulary,
    only,
)
from drafthead.heads.formats.layers import (
    FULL,
    NOT_OURS,
    SLIDING,
    LayerKeys,
    PlainLayers,
    draft_vocabulary,
    kinds_of_layers,
    layer_options,
    num_layers_of,
    spread_over,
    window_hides,
    without_output_bias,
)

NAMES = Renaming(
    {
        "lm_head.": "output.",
        "markov_head.markov_w1.": "correction.embed.",
        "markov_head.markov_w2.": "correction.output.",
        "markov_head.gate_proj.": "correction.gate.",
        "markov_head.joint_proj.": "correction.joint.",
        "confidence_head.proj.": "confidence.",
        "": "transformer.",
    }
)
CORRECTIONS = {"vanilla": "markov", "gated": "gated", "rnn": "recurrent"}
COPIES = {"embedding": "embed_tokens.weight", "output": "lm_head.weight"}


# Reading


NESTED = "dflash_config"
DOMINO = "our heads lack Domino's correction; serve it with SGLang, or train correction recurrent"
DFLASH2 = (
    "our heads lack DFlash2's convolutions and selector; serve it with vLLM, SGLang or llama.cpp"
)


class BlockKeys(Keys):
    """The keys of DFlash and DSpark beside those of their layers, none of which must be there.

    They are found beside the layers' keys, or under `dflash_config`, or in both places.
    """

    neutral: ClassVar[Reasons] = {
        "of training": "confidence_head_alpha max_anchors num_anchors",
        "shown by the tensors": "attention_mode confidence_head_with_markov",
        "its number is given": "mask_token",
    }
    block_size: Slots | None = None
    mask_token_id: Token | None = None
    draft_vocab_size: Vocabulary | None = None
    target_hidden_size: Size | None = None
    enable_confidence_head: bool | None = None
    use_confidence_head: bool | None = None  # of Model-Optimizer
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    markov_rank: Count | None = None
    # Whether the root's slot drafts, as in DSpark, or is not used, as in DFlash.
    sample_from_anchor: bool | None = None
    shift_label: bool | None = None
    # Whether slots see the slots after them.
    causal: bool | None = None
    is_causal: bool | None = None
    causal_head: bool | None = None  # of JetSpec
    # Whether all layers slide, by which window; `layer_types` may not show it.
    use_swa: bool | None = None
    swa_window_size: Count | None = None
    # What our heads do not have.
    use_aux_hidden_state: Annotated[bool, only(True, why="our heads read tapped layers")] = True
    projector_type: Annotated[str | None, only("dflash", "dspark", why=DOMINO)] = None
    conv_kernel_size: Annotated[int, only(0, why=DFLASH2)] = 0
    selector_rank: Annotated[int, only(0, why=DFLASH2)] = 0
    attention_sink_bias: Annotated[bool, only(False, why=NOT_OURS)] = False
    attention_value_scale: Annotated[float, only(1, why=NOT_OURS)] = 1.0
    output_multiplier: Annotated[float, only(1, why="our heads do not scale logits")] = 1.0
    final_logit_softcapping: Annotated[float, only(0, why="our heads do not cap logits")] = 0.0
    input_embedding_scale: Annotated[float, only(1, why="our heads read plain embeddings")] = 1.0

    def one_of(self, *names: str, default: Any = None) -> Any:
        """The value of keys that mean the same; raises UserError when two of them differ."""
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if len(set(given.values())) > 1:
            stated = " but ".join(f"{name} is {value}" for name, value in given.items())
            raise UserError(f"{self._file}: {stated}")
        return next(iter(given.values()), default)


class IdKeys(BlockKeys):
    """DFlash's and DSpark's keys with the tapped layers, as `hidden_states[id + 1]`."""

    target_layer_ids: LayerIds | None = None
    num_target_layers: TargetLayers | None = None


class NestingKeys(Keys):
    """The key of the object that holds the keys of z-lab's DFlash."""

    dflash_config: dict[str, Any] | None = None


BlockKeysType = TypeVar("BlockKeysType", bound=BlockKeys)


def block_keys(checkpoint: Checkpoint, declared: type[BlockKeysType]) -> BlockKeysType:
    """The keys of both places; raises UserError when they contradict each other."""
    checkpoint.account.add(NestingKeys)
    outer, inner = checkpoint.keys(declared), checkpoint.keys(declared, NESTED)
    for key in outer.model_fields_set & inner.model_fields_set:
        here, there = getattr(outer, key), getattr(inner, key)
        if here != there:
            raise UserError(
                f"{checkpoint.config_file}: {key} is {shown(here)}, but {NESTED}.{key} is "
                f"{shown(there)}"
            )
    return inner.model_copy(update={key: getattr(outer, key) for key in outer.model_fields_set})


def read_block(
    checkpoint: Checkpoint,
    keys: BlockKeys,
    taps: tuple[int, ...],
    root_predicts: bool,
    layers: Place = (),
    vocab_size: int | None = None,
    renaming: Renaming = NAMES,
) -> Foreign:
    """A block-parallel head of any of the formats.

    `taps` are in our numbers; `layers` leads to the configuration of the layers, which may be
    nested; `vocab_size` is the target's, for a configuration without one. A full output head and
    full embeddings in the file are copies of the target's.
    """
    shape, file = checkpoint.keys(LayerKeys, *layers), checkpoint.config_file
    vocab = stated("vocab_size", shape.vocab_size or vocab_size, file)
    num_layers = num_layers_of(checkpoint.tensors)
    shape.check(num_hidden_layers=num_layers)
    refuse_unknown_parts(checkpoint)
    slides, window = window_of(file, shape, keys, num_layers)
    kind = SLIDING if slides else FULL
    options = layer_options(checkpoint, layers, shape, "layers.0.", kind)
    hidden = options["hidden_size"]
    keys.check(target_hidden_size=hidden)
    vocabulary = draft_vocabulary(checkpoint, vocab, keys.draft_vocab_size)
    # With a draft vocabulary the file's output head is the head's own, of fewer rows.
    names = {k: n for k, n in COPIES.items() if not (k == "output" and vocabulary)}
    copies, left_out = checkpoint.present(names), {"d2t", "t2d", *names.values()}
    kept = [name for name in checkpoint.tensors if name not in left_out]
    found = {renaming.ours(name): checkpoint.load(name) for name in kept}
    config = ParallelConfig(
        **options,
        taps=taps,
        tap_norm=False,
        num_layers=num_layers,
        block_size=stated("block_size", keys.block_size, file),
        root_predicts=keys.one_of("sample_from_anchor", "shift_label", default=root_predicts),
        causal=keys.one_of("causal", "is_causal", "causal_head", default=slides),
        window=window,
        mask_token=stated("mask_token_id", keys.mask_token_id, file),
        vocab_size=vocab,
        draft_vocab_size=len(vocabulary.get("d2t", ())),
        **correction_of(checkpoint, keys, hidden),
    )
    facts = TargetFacts(base_name(checkpoint), hidden, vocab)
    tensors = {**without_output_bias(found), **vocabulary}
    return Foreign("parallel", config, tensors, facts, copies=copies)


def window_of(file: Path, shape: LayerKeys, keys: BlockKeys, num_layers: int) -> tuple[bool, int]:
    """Tell whether all layers are called sliding, and the window of all layers, 0 for none.

    In layers called sliding, slots see the slots before them only, unless a key says otherwise; in
    those that `use_swa` makes slide they see all of their block (vLLM, SGLang). Raises UserError
    where layers differ, and where a window has no size or is shorter than a block.
    """
    kinds, window = kinds_of_layers(shape, num_layers), keys.swa_window_size or shape.sliding_window
    slides = kinds == {SLIDING}
    if not slides and kinds != {FULL}:
        raise UserError(
            f"{file}: layer_types is {shown(shape.layer_types)}, but our layers slide all or none"
        )
    if not (slides or keys.use_swa) or not window_hides(shape, window):
        return slides, 0
    if window < (keys.block_size or 1):
        raise UserError(
            f"{file}: layers slide by a window of {window}, which is shorter than a block of "
            f"{keys.block_size}"
        )
    return slides, window


def stated(key: str, value: Any, file: Path) -> Any:
    """The value of a key; raises UserError when it is missing."""
    if value is None:
        raise UserError(f"{file}: {key} is missing")
    return value


# Parts of names of tensors that our heads do not have, and what would help.
UNKNOWN_PARTS = {
    "prefix_gru.": DOMINO,
    "embed_proj.": DOMINO,
    "_conv.": DFLASH2,
    "candidate_selector.": DFLASH2,
    "lilicorr.": "our heads lack LiLiCorr's re-ranking; serve it with vLLM or SGLang",
    "hidden_dim_adapter.": "our heads read features of their own width",
    "mask_embedding": "a vector for the mask token is not read here",
    "attention_sink_bias": NOT_OURS,
}


MASK_FILE = "mask_embedding.pt"  # of MiMo


def refuse_unknown_parts(checkpoint: Checkpoint) -> None:
    """Raise UserError for tensors, and a file, of parts that our heads do not have."""
    for name in checkpoint.tensors:
        for part, why in UNKNOWN_PARTS.items():
            if part in name:
                raise UserError(f"{checkpoint.weights} holds {name}: {why}")
    if (file := checkpoint.weights.parent / MASK_FILE).exists():
        raise UserError(f"{file} holds a vector for the mask token, which is not read here")


def correction_of(checkpoint: Checkpoint, keys: BlockKeys, hidden_size: int) -> dict[str, Any]:
    """The correction and confidence fields of `ParallelConfig`, from the tensors."""
    names, found = checkpoint.tensors, {"correction": "none", "correction_rank": 1}
    confident = "confidence_head.proj.weight" in names
    claimed = keys.one_of("enable_confidence_head", "use_confidence_head", default=confident)
    checkpoint.check_flag("enable_confidence_head", claimed, confident)
    if "markov_head.markov_w1.weight" in names:
        rank = checkpoint.shape("markov_head.markov_w1.weight", 2)[1]
        keys.check(markov_rank=rank)
        found = {
            "correction": CORRECTIONS[keys.markov_head_type or "vanilla"],
            "correction_rank": rank,
        }
    if not confident:
        return {**found, "confidence_weight": 0.0}
    reads = checkpoint.shape("confidence_head.proj.weight", 2)[1]
    return {**found, "confidence_weight": 1.0, "confidence_reads_token": reads > hidden_size}


# Writing


def refuse_unlike(
    known: WritableFormat, config: ParallelConfig, wanted: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise UserError for the first option that the formats lack or that is not in `wanted`."""
    known.refuse_options(config, {"tap_norm": (False,), "root_feature": (False,), **wanted})
    if config.mask_token is None:
        raise known.cannot_express(
            "head.mask_token null, a learned mask: its reader uses the embedding of a token"
        )


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


@dataclass(frozen=True)
class Seen:
    """The sight of the slots of a block: those before them or all, by a window if it is not 0."""

    causal: bool = False
    window: int = 0

    def mask(self, size: int, length: int) -> torch.Tensor:
        """A mask of the `length` positions and own slots that a block's slots see, [K, T + K]."""
        slots, places = torch.arange(length, length + size)[:, None], torch.arange(length + size)
        mask = torch.ones(size, length + size, dtype=torch.bool)
        if self.causal:
            mask &= places <= slots
        return mask & (slots - places < self.window) if self.window else mask


def replayed(
    layer_config: dict[str, Any],
    config: dict[str, Any],
    tensors: Tensors,
    probe: Probe,
    root_predicts: bool,
    seen: Seen,
) -> torch.Tensor:
    """The readers' logits [K, V], computed from tensors under their names."""
    layers = PlainLayers(layer_config, tensors)
    features = torch.cat([tap[0] for tap in probe.features.taps], dim=-1)  # [T, taps x D]
    context = layers.norm("hidden_norm", layers.linear("fc", features))
    size, length = config["block_size"], len(context)
    ids = torch.full((size,), config["mask_token_id"])
    ids[0] = probe.tokens[0, -1]
    hidden, slots = probe.target.embed(ids), torch.arange(length, length + size)
    places = torch.arange(length + size)
    mask = seen.mask(size, length)
    for index in range(num_layers_of(tensors)):
        layer = f"layers.{index}."
        normed = layers.norm(layer + "input_layernorm", hidden)
        read = torch.cat([context, normed])
        hidden = hidden + layers.attention(layer, read, places, normed, slots, mask)
        hidden = layers.mlp(layer, hidden)
    hidden = layers.norm("norm", hidden)[0 if root_predicts else 1 :]
    head = tensors.get("lm_head.weight")
    logits = probe.target.project(hidden) if head is None else hidden @ head.T
    logits = logits + markov_bias(layers, config, probe.before, hidden)
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
