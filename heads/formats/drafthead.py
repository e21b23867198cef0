"""Our own format, as `heads.checkpoint.save_head` writes it."""

from dataclasses import fields
from typing import Any

from drafthead.heads.base import head_family
from drafthead.heads.errors import UserError
from drafthead.heads.formats.base import Foreign, Format, TargetFacts, register_format
from drafthead.heads.formats.files import CONFIG_FILE, Checkpoint, read_json
from drafthead.heads.trees.tree import Path as TreePath

VERSION = 1
ACCEPTANCE_FILE = "acceptance.json"
TAP_CONVENTION = "output of layer"  # see heads.target.FeatureSpec
MAX_COUNT = 1024  # of heads, layers, blocks, steps: more would be a mistake


@register_format
class DraftheadFormat(Format):
    """A head as this project trains and stores it."""

    name = "drafthead"
    families = ()  # all; written by save_head
    readers = "drafthead"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """The configuration states the format."""
        return "drafthead_format" in checkpoint.config

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """Everything as it was saved."""
        config_file, content = checkpoint.weights.parent / CONFIG_FILE, checkpoint.config
        try:
            version = content["drafthead_format"]
            if version != VERSION:
                raise ValueError(f"format {version!r} is not the known format {VERSION}")
            family = head_family(content["family"])
            values = known_fields(family.config_class, content["head"])
            check_counts(values)
            config = family.config_class(**values)
            facts = content["target"]
            found = TargetFacts(**{f.name: facts.get(f.name) for f in fields(TargetFacts)})
            taps = content["features"]
            described = ", ".join([*map(str, taps["layers"]), *["last"] * bool(taps["last"])])
            convention = taps["layer_convention"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{config_file} is not a head's configuration: {error}") from error
        return Foreign(
            family.family,
            config,
            {name: checkpoint.load(name) for name in checkpoint.tensors},
            found,
            taps=f"{described} ({convention})",
            path_counts=read_acceptance(checkpoint),
            provenance=content.get("provenance") or {},
        )


def known_fields(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """`values`, if all are fields of the config class; raises UserError naming the others."""
    names = {field.name for field in fields(config_class)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise UserError(f"{config_class.__name__} does not know {', '.join(unknown)}")
    return values


def check_counts(values: dict[str, Any]) -> None:
    """Raise ValueError for counts so large that building the head would never end."""
    for name, value in values.items():
        counts = name.startswith("num_") or name in ("depth", "ttt_steps")
        if counts and not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{name} is {value!r}")


def read_acceptance(checkpoint: Checkpoint) -> dict[TreePath, int] | None:
    """How often each path of guesses was right; None if it was never measured."""
    file = checkpoint.weights.parent / ACCEPTANCE_FILE
    if not file.exists() and not file.is_symlink():
        return None
    try:
        counts = read_json(file).get("path_counts", [])
        return {tuple(int(rank) for rank in path): int(count) for path, count in counts}
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} does not hold counts of paths: {error}") from error
