"""Our own format: `config.json`, `model.safetensors` and `acceptance.json` in one folder.

Every file is written under a temporary name and renamed, so no file is ever half written. What a
head needs of its target is stored and checked when it is loaded.

The types and bounds of a head's own keys follow from its family's configuration class. They hold
for heads of every format, see `check_head_config`.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import torch
from pydantic import ConfigDict, Field, create_model
from safetensors.torch import save_file

from drafthead.core.errors import UserError
from drafthead.core.storage.files import let_others_read, replacing, write_json, write_text
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Path as TreePath
from drafthead.heads.base import DraftHead, head_family
from drafthead.heads.formats.base import WEIGHTS, Foreign, Format, TargetFacts, register_format
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.files import CONFIG_FILE, read_json
from drafthead.heads.formats.keys import (
    MOST_PARTS,
    MOST_SIZE,
    MOST_TOKENS,
    Keys,
    LayerId,
    LayerIds,
    ModelKeys,
    Reasons,
    Size,
    TargetLayers,
    Vocabulary,
)
from drafthead.heads.formats.rope import RopeKeys, known_rope
from drafthead.heads.objectives.batch import MAX_RANK

VERSION = 1
ACCEPTANCE_FILE = "acceptance.json"
TAP_CONVENTION = "output of layer"  # see heads.target.FeatureSpec


class TargetKeys(Keys):
    """The keys that describe the target."""

    name: str | None = None
    hidden_size: Size | None = None
    vocab_size: Vocabulary | None = None
    num_layers: TargetLayers | None = None


class FeatureKeys(Keys):
    """The hidden states that the head reads."""

    layers: LayerIds
    last: bool
    layer_convention: str


class OwnKeys(Keys):
    """Our `config.json`; the head's own keys depend on its family."""

    knows_null = True
    neutral: ClassVar[Reasons] = {"whatever was recorded when it was trained": "provenance"}
    drafthead_format: Literal[1]
    family: str
    head: dict[str, Any]
    target: TargetKeys
    features: FeatureKeys
    provenance: dict[str, Any] | None = None


Rank = Annotated[int, Field(ge=0, lt=MAX_RANK)]
Ranks = Annotated[list[Rank], Field(max_length=MOST_PARTS, fail_fast=True)]
Times = Annotated[int, Field(ge=0, le=2**53)]


class AcceptanceKeys(Keys):
    """Our `acceptance.json`: how often each path of guesses was right."""

    path_counts: Annotated[list[tuple[Ranks, Times]], Field(fail_fast=True)] = Field(default=[])


@register_format
class DraftheadFormat(Format):
    """A head as this project trains and stores it."""

    name = "drafthead"
    families = ()  # all; written by save_head
    readers = "drafthead"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return "drafthead_format" in checkpoint.config

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        keys, file = checkpoint.keys(OwnKeys), checkpoint.config_file
        family = head_family(keys.family)
        checkpoint.account.add(keys_of(family.config_class), ("head",))
        checkpoint.account.add(RopeKeys, ("head", "rope_parameters"))
        checkpoint.account.add(ModelKeys, ("head", "layer"))
        try:
            config = read_head_config(family.config_class, keys.head, file)
        except UserError:
            raise
        except (TypeError, ValueError) as error:  # of the configuration, which checks itself
            raise UserError(f"{file}: head: {error}") from error
        features = keys.features
        taps = ", ".join([*map(str, features.layers), *["last"] * features.last])
        return Foreign(
            family.family,
            config,
            {name: checkpoint.load(name) for name in checkpoint.tensors},
            TargetFacts(**keys.target.model_dump()),
            taps=f"{taps} ({features.layer_convention})",
            path_counts=read_acceptance(checkpoint),
            provenance=keys.provenance or {},
        )


def read_acceptance(checkpoint: Checkpoint) -> dict[TreePath, int] | None:
    """Return how often each path of guesses was right; None if it was never measured."""
    file = checkpoint.weights.parent / ACCEPTANCE_FILE
    if not file.exists() and not file.is_symlink():
        return None
    counts = AcceptanceKeys.of(read_json(file), file).path_counts
    return {tuple(ranks): times for ranks, times in counts}


# A head's own keys


# Fields of the families' configurations; a size of 0 is filled in from the target.
LIMITS = {
    "num_attention_heads": (0, 2**14),
    "num_key_value_heads": (0, 2**14),
    "head_dim": (0, 2**16),
    "vocab_size": (0, MOST_TOKENS),
    "draft_vocab_size": (0, MOST_TOKENS),
    "mask_token": (0, MOST_TOKENS),
    "max_position_embeddings": (0, 2**31),
    "rms_norm_eps": (0, 1),
    "block_size": (1, 256),
    "depth": (1, MOST_PARTS),
    "ttt_steps": (1, MOST_PARTS),
}


def limits(name: str) -> tuple[int, int]:
    """The least and the largest number that the field `name` may be."""
    return LIMITS.get(name, (0, MOST_PARTS if name.startswith("num_") else MOST_SIZE))


def bounded(name: str, kind: Any) -> Any:
    """The type `kind` of the field `name`, with bounds if it is a number."""
    least, most = limits(name)
    if kind in (int, float):
        return Annotated[kind, Field(ge=least, le=most)]
    if set(get_args(kind)) == {int, type(None)}:
        return Annotated[int, Field(ge=least, le=most)] | None
    return tuple[LayerId, ...] if kind == tuple[int, ...] else kind


@cache
def keys_of(config_class: type) -> type[Keys]:
    """The keys of a head's configuration: the fields of its class and nothing else."""
    kinds = get_type_hints(config_class)
    declared: dict[str, Any] = {}
    for field in fields(config_class):
        required = field.default is MISSING and field.default_factory is MISSING
        # What is left out gets its default from the class itself.
        declared[field.name] = (bounded(field.name, kinds[field.name]), ... if required else None)
    return create_model(config_class.__name__, __base__=HeadKeys, **declared)


class HeadKeys(Keys):
    """The keys of a head's configuration; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")
    knows_null = True


def read_head_config(config_class: type, content: dict[str, Any], file: Path) -> Any:
    """An instance of a family's configuration class from an object in `file`.

    Raises UserError naming what is unknown, of the wrong type or out of bounds, and ValueError for
    what the class itself refuses.
    """
    keys = keys_of(config_class).of(content, file, "head")
    values = {name: getattr(keys, name) for name in content}
    if values.get("rope_parameters") is not None:
        rope, head_dim = values["rope_parameters"], values.get("head_dim", 0)
        values["rope_parameters"] = known_rope(rope, head_dim, file, "head.rope_parameters")
    return config_class(**values)


def check_head_config(config: Any, file: Path) -> None:
    """Raise UserError when a configuration that a reader made is out of bounds."""
    read_head_config(type(config), asdict(config), file)


# Writing


def save_head(
    head: DraftHead,
    folder: Path,
    target: Target | TargetFacts,
    target_name: str | None,
    provenance: dict[str, Any],
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write a head, the facts about its target and its provenance.

    `provenance` is anything JSON can hold: the run's configuration, data, versions. `dtype` None
    keeps the head's own types.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.detach()
        .to("cpu", dtype if t.is_floating_point() and dtype else t.dtype)
        .contiguous()
        for name, t in head.state_dict().items()
    }
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
        let_others_read(temporary)
    if head.path_counts is not None:
        write_acceptance(folder, head.path_counts)
    sizes = target.hidden_size, target.vocab_size, target.num_layers
    facts = TargetFacts(target_name, *sizes)
    description = {
        "drafthead_format": VERSION,
        "family": head.family,
        "head": asdict(head.config),
        "target": asdict(facts),
        "features": {
            "layers": list(head.features_needed.layers),
            "layer_convention": TAP_CONVENTION,
            "last": head.features_needed.last,
        },
        "provenance": provenance,
    }
    write_json(folder / CONFIG_FILE, description)


def write_acceptance(folder: Path, path_counts: Mapping[TreePath, int]) -> None:
    """Write how often each path of guesses was right; see `heads.growing.static.grow_tree`."""
    counts = [[list(path), count] for path, count in path_counts.items()]
    write_text(folder / ACCEPTANCE_FILE, json.dumps({"path_counts": counts}) + "\n")


def is_own_folder(path: Path) -> bool:
    """Tell whether a path is a folder on this machine that holds a head of our format."""
    config = path / CONFIG_FILE
    return config.is_file() and "drafthead_format" in read_json(config)
