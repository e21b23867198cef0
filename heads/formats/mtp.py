"""MTP layers in the files of their models, where transformers leaves them out.

One layer is read, the first; it drafts all depths, as vLLM and SGLang let it where a model has one.
Its experts stand one by one in the files, and as two tensors in the layers of transformers.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.configuration_utils import PretrainedConfig

from drafthead.core.errors import UserError, first_line
from drafthead.heads.families.recurrent.mtp import MtpConfig, MtpHead
from drafthead.heads.formats.base import (
    DEPTH,
    Export,
    Foreign,
    Probe,
    TargetFacts,
    Tensors,
    WritableFormat,
    Written,
    register_format,
)
from drafthead.heads.formats.checkpoint import Checkpoint, checkpoints_at
from drafthead.heads.formats.keys import ModelKeys, Parts, Renaming
from drafthead.heads.layers.own_layer import config_named, mtp_layer_of

OURS = "layers.0.layer."  # before the names of the decoder layer's own tensors
COPIES = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "output"}
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of MTP layers, in configurations
KINDS = ("gate", "up", "down")  # of an expert's matrices
EXPERT = re.compile(rf"(.*\.experts)\.(\d{{1,5}})\.({'|'.join(KINDS)})_proj\.weight")
QUANTISED = re.compile(r".*[._](scales?|scale_inv|qweight|qzeros|absmax)")


class MtpLayout(NamedTuple):
    """A layout: how models name the tensors of their first MTP layer."""

    place: str  # what comes before all names of the layer, as a regular expression
    names: dict[str, str]  # how names then begin, and how ours do; that of `fc` is the first
    states_first: bool = False  # whether `fc` reads the state before the embedding

    def place_in(self, names: Iterable[str]) -> str | None:
        """The prefix of the first MTP layer's names among usual names; None without one."""
        found = re.compile(rf"({self.place}){next(iter(self.names))}weight")
        places = [match[1] for name in names if (match := found.fullmatch(name))]
        return min(places, key=lambda place: (len(place), place), default=None)

    def ours(self, rest: str) -> str:
        """Our name of a tensor that is called so after the place; unknown ones stay."""
        return rest if rest in COPIES else Renaming(self.names).ours(rest)


LAYOUTS = (
    MtpLayout(  # DeepSeek, GLM and others
        r"layers\.\d{1,4}\.",
        {"eh_proj.": "fc.", "enorm.": "enorm.", "hnorm.": "hnorm.", "shared_head.norm.": "norm."}
        | {"": OURS},
    ),
    MtpLayout(  # MiMo
        r"mtp_layers\.0\.",
        {"input_proj.": "fc.", "token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm."}
        | {"final_layernorm.": "norm.", "": OURS},
        states_first=True,
    ),
    MtpLayout(  # Qwen and others
        r"mtp\.",
        {"fc.": "fc.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
        | {"norm.": "norm.", "layers.0.": OURS},
    ),
)


class NamedLayer:
    """The first MTP layer among the tensors of a model, by their usual names."""

    def __init__(self, names: Collection[str]):
        """Raises UserError when there is none."""
        places = ((layout, layout.place_in(names)) for layout in LAYOUTS)
        found = next(((layout, place) for layout, place in places if place is not None), None)
        if found is None:
            raise UserError("there is no MTP layer")
        self.layout, place = found
        rests = [name.removeprefix(place) for name in names if name.startswith(place)]
        own = [rest for rest in rests if not re.match(r"layers\.[1-9]", rest)]
        self.names = {self.layout.ours(rest): place + rest for rest in own}  # usual ones by ours

    def read(self, load: Callable[[str], torch.Tensor]) -> tuple[Tensors, Tensors]:
        """The tensors [...] of our head, and copies of the target's; `load` takes a name."""
        tensors = {ours: load(name) for ours, name in self.names.items()}
        copies = {what: tensors.pop(name) for name, what in COPIES.items() if name in tensors}
        return self.in_order(joined(tensors)), copies

    def written(self, tensors: Tensors) -> Tensors:
        """The tensors [...] of our head by the names of the model; undoes `read`.

        Raises UserError for a tensor that the model's layer does not have.
        """
        tensors = self.in_order(tensors)
        if not tensors.keys() <= self.names.keys():
            tensors = split(tensors)
        if others := sorted(tensors.keys() - self.names.keys()):
            raise UserError(f"the MTP layer in the target's files has no {others[0]}")
        return {self.names[ours]: tensor for ours, tensor in tensors.items()}

    def in_order(self, tensors: Tensors) -> Tensors:
        """The tensors [...] with the halves of `fc` exchanged if the model exchanges its inputs."""
        weight = tensors["fc.weight"]
        half = len(weight) if self.layout.states_first else 0
        return {**tensors, "fc.weight": weight.roll(half, 1)}


class MtpKeys(ModelKeys):
    """Of a model with an MTP layer, and one of ours."""

    drafthead_depth: Parts | None = None


@register_format
class Mtp(WritableFormat):
    """The files of a model that has an MTP layer; what is written are that layer's tensors."""

    name = "mtp"
    families = ("mtp",)
    readers = "vLLM, SGLang, transformers, with the model's other files"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """A projection of two vectors stands where some model has that of its MTP layer."""
        names = checkpoint.tensors
        return any(layout.place_in(names) is not None for layout in LAYOUTS)

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The first MTP layer of a model; the others are left, and noted."""
        depth = checkpoint.keys(MtpKeys).drafthead_depth
        try:
            config = config_named(checkpoint.config)
            head = head_config(config, depth)
        except UserError:
            raise
        except Exception as error:  # transformers raises many kinds for a wrong configuration
            raise UserError(
                f"{checkpoint.config_file} describes no model: {first_line(error)}"
            ) from error
        layer = NamedLayer(checkpoint.tensors)
        checkpoint.shape(layer.names["fc.weight"], 2)
        if narrow := next((n for n in layer.names.values() if QUANTISED.fullmatch(n)), None):
            raise UserError(
                f"{checkpoint.weights}: the MTP layer is quantised ({narrow}): read it from a "
                "copy of the model in bfloat16"
            )
        tensors, copies = layer.read(checkpoint.load)
        counts = [getattr(config, key, None) for key in COUNTS]
        layers = next((count for count in counts if isinstance(count, int)), 1)
        return Foreign(
            "mtp",
            head,
            tensors,
            TargetFacts(
                *(str(checkpoint.path), config.hidden_size),
                *(config.vocab_size, config.num_hidden_layers),
            ),
            notes=(f"the first of {layers} MTP layers was read: it drafts all depths",)
            * (layers > 1),
            copies=copies,
        )

    def written(self, export: Export) -> Written:
        """The layer under the names that it has in the target's files, and their configuration."""
        target = self.needed_target(export, "what the target's files call their MTP layer")
        name = target.model.name_or_path  # empty of a model that was never in files
        found = next(filter(self.recognises, checkpoints_at(Path(name)) if name else ()), None)
        if found is None:
            raise self.cannot_express(f"a layer for {name or 'this target'}, whose files have none")
        stored = NamedLayer(found.tensors).written(export.tensors)
        return Written(
            {found.file.name_in_file(name): tensor for name, tensor in stored.items()},
            {**found.config, DEPTH: export.config.depth},
        )

    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """Logits [K, V]: whole passes of the layer without a cache; its outputs are fed back."""
        head = MtpHead(head_config(config_named(config), None)).eval()
        head.load_state_dict(NamedLayer(tensors).read(tensors.__getitem__)[0])
        states, rows = probe.states[None], []
        following = torch.cat([probe.tokens[0], probe.chain])[None]
        for _ in probe.chain:
            places = torch.arange(states.shape[1])[None]
            sees = (places[0, :, None] >= places)[None, None]
            embeds = probe.target.embed(following[:, : states.shape[1]])
            rotation = head.rotary(places)
            outputs = head.run_layers(embeds, states, rotation, sees, lambda _: lambda *kept: kept)
            rows.append(probe.target.project(outputs[0, -1]))
            states = torch.cat([states, outputs[:, -1:]], dim=1)
        return torch.stack(rows)


def head_config(config: PretrainedConfig, depth: int | None) -> MtpConfig:
    """The configuration of our head for the MTP layer of a model; `depth` None is the usual one."""
    depth = depth or MtpConfig.depth
    return MtpConfig(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        depth=depth,
        ttt_steps=min(depth, MtpConfig.ttt_steps),
        layer=mtp_layer_of(config),
    )


def joined(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors [...] with those of single experts as transformers joins them.

    Of E experts the matrices gate and up [I, D] become one [E, 2 I, D], and down [D, I] one
    [E, D, I]. Raises UserError when a matrix is missing or of another shape than the others.
    """
    found: Tensors = {}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
    for place, parts in experts.items():
        numbers = range(math.ceil(len(parts) / 3))  # a matrix too few leaves one out
        try:
            gate, up, down = (torch.stack([parts[kind, n] for n in numbers]) for kind in KINDS)
            found[f"{place}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            found[f"{place}.down_proj"] = down
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{place} of the MTP layer are not whole: {error}") from error
    return found


def split(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors [...] with experts one by one, as models store them: undoes `joined`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".experts"):
            found[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            for each, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                found[f"{place}.{number}.{each}_proj.weight"] = part.clone()
    return found
