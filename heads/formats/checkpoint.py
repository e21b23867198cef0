"""A trained head on disk: `config.json`, `model.safetensors` and `acceptance.json` in one folder.

Every file is written under a temporary name and renamed, so no file is ever half written. What a
head needs of its target is stored and checked when it is loaded. `load_head` also reads heads of
other software, see `heads.formats`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafthead.heads.base import DraftHead
from drafthead.heads.formats import load_head
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.drafthead import ACCEPTANCE_FILE, TAP_CONVENTION, VERSION
from drafthead.heads.formats.files import CONFIG_FILE, read_json
from drafthead.heads.storage.files import let_others_read, write_text
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Path as TreePath

__all__ = ["is_own_folder", "load_head", "save_head", "write_acceptance"]

WEIGHTS_FILE = "model.safetensors"


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
    temporary = folder / (WEIGHTS_FILE + ".tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    let_others_read(temporary)
    temporary.replace(folder / WEIGHTS_FILE)
    if head.path_counts is not None:
        write_acceptance(folder, head.path_counts)
    description = {
        "drafthead_format": VERSION,
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


def write_acceptance(folder: Path, path_counts: Mapping[TreePath, int]) -> None:
    """Write how often each path of guesses was right; see `heads.trees.static.grow_tree`."""
    counts = [[list(path), count] for path, count in path_counts.items()]
    write_text(folder / ACCEPTANCE_FILE, json.dumps({"path_counts": counts}) + "\n")


def is_own_folder(path: Path) -> bool:
    """Whether a path is a folder on this machine that holds a head of our format."""
    config = path / CONFIG_FILE
    return config.is_file() and "drafthead_format" in read_json(config)
