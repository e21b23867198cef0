"""The manifest of a distillation: the JSON file beside its output that holds the settings."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from drafthead.heads.errors import UserError
from drafthead.train.distillation.settings import DistillSettings

REMEDY = "choose another --output, or --overwrite to start again"


def manifest_path(output: Path) -> Path:
    """The JSON file beside the output that records the settings."""
    # Not *.json: a folder of outputs can be read as training data.
    return output.with_name(output.name + ".manifest")


def lock_path(output: Path) -> Path:
    """The file that the only writer of an output holds."""
    return output.with_name(f".{output.name}.lock")


def read_manifest(output: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """The manifest of an output.

    Raises UserError, with what can be done, if there is none, or none that can be read.
    """
    manifest = manifest_path(output)
    if not manifest.exists():
        raise UserError(
            f"{output} exists without {manifest.name}, so its settings are unknown: {remedy}"
        )
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{manifest} is no valid JSON ({error.msg}): {remedy}") from error
    if not isinstance(recorded, dict):
        raise UserError(f"{manifest} is not the manifest of a distillation: {remedy}")
    return recorded


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """The first setting in which two manifests differ, with both values.

    One that a manifest of an older version lacks had its default.
    """
    for item in fields(DistillSettings):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        values = one.get(item.name, default), other.get(item.name, default)
        if values[0] != values[1]:
            return item.name, *values
    return None
