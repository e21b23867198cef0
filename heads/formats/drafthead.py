"""Our own format, as `heads.formats.checkpoint.save_head` writes it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from drafthead.heads.base import MAX_RANK, head_family
from drafthead.heads.errors import UserError
from drafthead.heads.formats.base import Foreign, Format, TargetFacts, register_format
from drafthead.heads.formats.files import Checkpoint, read_json
from drafthead.heads.formats.head_keys import keys_of, read_head_config
from drafthead.heads.formats.keys import (
    MOST_PARTS,
    Keys,
    LayerIds,
    Reasons,
    Size,
    TargetLayers,
    Vocabulary,
)
from drafthead.heads.formats.rope import RopeKeys
from drafthead.heads.trees.tree import Path as TreePath

VERSION = 1
ACCEPTANCE_FILE = "acceptance.json"
TAP_CONVENTION = "output of layer"  # see heads.target.FeatureSpec


class TargetKeys(Keys):
    """What is known of the target."""

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
        """The configuration states the format."""
        return "drafthead_format" in checkpoint.config

    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """Everything as it was saved."""
        keys, file = checkpoint.keys(OwnKeys), checkpoint.config_file
        family = head_family(keys.family)
        checkpoint.account.add(keys_of(family.config_class), ("head",))
        checkpoint.account.add(RopeKeys, ("head", "rope_parameters"))
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
    """How often each path of guesses was right; None if it was never measured."""
    file = checkpoint.weights.parent / ACCEPTANCE_FILE
    if not file.exists() and not file.is_symlink():
        return None
    counts = AcceptanceKeys.of(read_json(file), file).path_counts
    return {tuple(ranks): times for ranks, times in counts}
