"""Rotary parameters of a configuration, in the forms of transformers 4 and 5."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.printing import shown
from drafthead.heads.formats.checkpoint import Checkpoint
from drafthead.heads.formats.keys import Keys, Place, Positive, Reasons, only

DEFAULT_THETA = 10000.0  # of transformers, for a configuration without one
Factors = Annotated[list[Positive], Field(fail_fast=True)]
# What each way to scale positions cannot do without.
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class RopeKeys(Keys):
    """Rotary parameters as transformers 5 names them."""

    neutral: ClassVar[Reasons] = {
        "the older name of rope_type": "type",
        "for pictures; of text all kinds of position are equal": "mrope_section mrope_interleaved",
    }
    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] = "default"
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] = DEFAULT_THETA
    partial_rotary_factor: Annotated[float, only(1, why="our layers rotate whole heads")] = 1.0
    factor: Positive | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=2**31)] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e6)] | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    truncate: bool | None = None


def known_rope(
    rope: Mapping[str, Any], head_dim: int, file: Path, within: str = "rope_parameters"
) -> dict[str, Any]:
    """The rotary parameters that transformers knows; it would warn of neutral ones.

    Raises UserError for those with which positions would not be rotated sensibly.
    """
    keys = RopeKeys.of(rope, file, within)
    for name in NEEDED.get(keys.rope_type, ()):
        if getattr(keys, name) is None:
            raise UserError(f"{file}: rope_type {keys.rope_type} needs {name}, which is missing")
    low, high = keys.low_freq_factor or 0, keys.high_freq_factor or 0
    if keys.rope_type == "llama3" and not low < high:
        raise UserError(f"{file}: low_freq_factor {low} must be below high_freq_factor {high}")
    for name in ("short_factor", "long_factor"):
        factors = getattr(keys, name)
        if keys.rope_type == "longrope" and len(factors) != head_dim // 2:
            raise UserError(
                f"{file}: {name} has {len(factors)} numbers, but must have {head_dim // 2}"
            )
    return {key: value for key, value in rope.items() if key in RopeKeys.model_fields}


class RopeForms(Keys):
    """The keys under which configurations hold rotary parameters."""

    rope_parameters: dict[str, Any] | None = None  # of transformers 5
    rope_scaling: dict[str, Any] | None = None  # of transformers 4
    rope_theta: Any = None


class RopeKinds(Keys):
    """The rotary parameters of each kind of layer, which some models have."""

    full_attention: dict[str, Any] | None = None
    sliding_attention: dict[str, Any] | None = None


def rope_of(
    checkpoint: Checkpoint, head_dim: int, place: Place, kind: str = "full_attention"
) -> dict[str, Any]:
    """Rotary parameters in the form of transformers 5, from those of 4 or 5 at `place`.

    `kind` is that of the head's layers. Raises UserError for unsupported parameters, and when the
    forms disagree.
    """
    file, forms = checkpoint.config_file, checkpoint.keys(RopeForms, *place)
    checkpoint.account.add(RopeKeys, (*place, "rope_scaling"))
    new = forms.rope_parameters or {}
    if set(RopeKinds.model_fields) & set(new):
        new = rope_of_kind(checkpoint, kind, (*place, "rope_parameters"))
    else:
        checkpoint.account.add(RopeKeys, (*place, "rope_parameters"))
    chosen: dict[str, Any] = {}
    if forms.rope_theta is not None:
        chosen["rope_theta"] = forms.rope_theta
    for form in [with_type(form, file) for form in (new, forms.rope_scaling) if form]:
        for key, value in form.items():
            if key in chosen and chosen[key] != value:
                raise UserError(
                    f"{file}: {key} is {shown(chosen[key])} here and {shown(value)} there"
                )
        chosen |= form
    chosen = {"rope_type": "default", "rope_theta": DEFAULT_THETA, **chosen}
    chosen = known_rope(chosen, head_dim, file)
    chosen.pop("partial_rotary_factor", None)
    return {**chosen, "rope_theta": float(chosen["rope_theta"])}


def rope_of_kind(checkpoint: Checkpoint, kind: str, place: Place) -> dict[str, Any]:
    """The rotary parameters of a kind of layer from the object at `place`, which has several.

    Raises UserError when there are none of this kind.
    """
    kinds = checkpoint.keys(RopeKinds, *place)
    for name in RopeKinds.model_fields:  # of layers that the head does not have, too
        checkpoint.account.add(RopeKeys, (*place, name))
    found = getattr(kinds, kind)
    if found is None:
        raise UserError(f"{checkpoint.config_file}: {'.'.join((*place, kind))} is missing")
    return found


def with_type(form: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """One form without nulls, its type under `rope_type`; older configurations call it `type`."""
    found = {key: value for key, value in form.items() if value is not None and key != "type"}
    old = form.get("type")
    if old is not None and found.setdefault("rope_type", old) != old:
        raise UserError(
            f"{file}: rope_type is {shown(found['rope_type'])} and type is {shown(old)}"
        )
    if found.get("rope_type") == "mrope":  # default, but for pictures
        found["rope_type"] = "default"
    return {"rope_type": "default", **found}
