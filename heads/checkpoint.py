"""A trained head on disk: `config.json`, `model.safetensors` and `acceptance.json` in one folder.

Every file is written under a temporary name and renamed, so a folder is whole or not there. What a
head needs of its target is written down and checked when it is loaded.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafthead.heads.base import DraftHead, head_family
from drafthead.heads.errors import UserError
from drafthead.heads.target import Target

FORMAT = 1
CONFIG_FILE, WEIGHTS_FILE, ACCEPTANCE_FILE = "config.json", "model.safetensors", "acceptance.json"
TAP_CONVENTION = "output of layer"  # see heads.target.FeatureSpec


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def save_head(
    head: DraftHead,
    folder: Path,
    target: Target,
    target_name: str,
    provenance: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head with what it needs of its target and where it came from.

    `provenance` is anything JSON can hold: the run's configuration, data, versions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype).contiguous()
        for name, t in head.state_dict().items()
    }
    temporary = folder / (WEIGHTS_FILE + ".tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS_FILE)
    if head.path_counts is not None:
        counts = [[list(path), count] for path, count in head.path_counts.items()]
        write_text(folder / ACCEPTANCE_FILE, json.dumps({"path_counts": counts}) + "\n")
    description = {
        "drafthead_format": FORMAT,
        "family": head.family,
        "head": asdict(head.config),
        "target": {
            "name": target_name,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_layers": target.num_layers,
        },
        "features": {
            "layers": list(head.features_needed.layers),
            "layer_convention": TAP_CONVENTION,
            "last": head.features_needed.last,
        },
        "provenance": provenance,
    }
    write_text(folder / CONFIG_FILE, json.dumps(description, indent=2) + "\n")


def load_head(folder: Path, target: Target) -> DraftHead:
    """Read a head for `target`, in its type and on its device.

    Raises UserError, with the file and the value, when a file is missing or damaged, the family is
    unknown, or the head was trained for a target of another width or vocabulary.
    """
    description = read_json(folder / CONFIG_FILE)
    try:
        family = head_family(description["family"])
        config = family.config_class(**known_fields(family.config_class, description["head"]))
        trained_for = description["target"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG_FILE} is not a head's configuration: {error}") from error
    check_target(folder, trained_for, target)
    head = family(config)
    load_weights(head, folder / WEIGHTS_FILE)
    if (folder / ACCEPTANCE_FILE).exists():
        counts = read_json(folder / ACCEPTANCE_FILE).get("path_counts", [])
        head.path_counts = {tuple(path): count for path, count in counts}
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises UserError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: is {path.parent} a trained head?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def known_fields(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """`values` if the config class has a field for each; raises UserError naming the others."""
    names = {field.name for field in fields(config_class)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise UserError(f"{config_class.__name__} does not know {', '.join(unknown)}")
    return values


def check_target(folder: Path, trained_for: dict[str, Any], target: Target) -> None:
    """Raise UserError when the head was trained for another kind of target."""
    for name in ("hidden_size", "vocab_size", "num_layers"):
        expected, found = trained_for.get(name), getattr(target, name)
        if expected != found:
            raise UserError(
                f"the head in {folder} was trained for {trained_for.get('name', 'a target')} with "
                f"{name} {expected}, but this target has {name} {found}"
            )


def load_weights(head: DraftHead, path: Path) -> None:
    """Fill the head from a safetensors file that holds just its tensors, in their shapes."""
    if not path.exists():
        raise UserError(f"{path} does not exist: is {path.parent} a trained head?")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from error
    expected = head.state_dict()
    if missing := sorted(set(expected) - set(tensors)):
        raise UserError(f"{path} lacks {len(missing)} tensors, the first is {missing[0]}")
    if extra := sorted(set(tensors) - set(expected)):
        raise UserError(f"{path} holds {len(extra)} unknown tensors, the first is {extra[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: {name} has shape {list(tensor.shape)}, "
                f"its configuration says {list(expected[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {name} holds values that are not finite")
    head.load_state_dict(tensors)
