"""A trained draft model on disk: what transformers loads, with its tokenizer and its origin."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from drafthead.heads.layers.draft_vocabulary import tables_of
from drafthead.heads.storage.files import let_others_read, write_text
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.frequent_tokens import (
    DRAFT_IDS,
    DRAFT_IDS_FILE,
    read_draft_vocabulary,
)
from drafthead.train.draft_models.student import Student

ORIGIN_FILE = "training.json"


def save_draft_model(
    student: Student, folder: Path, target: Target, target_name: str, origin: dict[str, Any]
) -> None:
    """Write the model in bfloat16, its tokenizer and its origin; the student keeps that type.

    Every file is written under a temporary name and renamed. `origin` is anything JSON can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".model.", dir=folder) as temporary:
        student.model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps Module.to
        student.model.save_pretrained(temporary)
        assert target.tokenizer is not None  # a target read from disk has one
        target.tokenizer.save_pretrained(temporary)
        guesses = student.draft_ids
        if guesses is not None:
            write_text(Path(temporary) / DRAFT_IDS_FILE, json.dumps({DRAFT_IDS: guesses.tolist()}))
        written = json.dumps({"target": target_name, **origin}, indent=2)
        write_text(Path(temporary) / ORIGIN_FILE, written + "\n")
        for file in sorted(Path(temporary).iterdir()):
            let_others_read(file)
            shutil.move(file, folder / file.name)


def draft_model_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a draft model in a folder, by the names that a student has for them.

    Raises UserError when no model can be loaded from it.
    """
    trained = Target.from_pretrained(folder, "float32", "cpu")
    weights = {f"model.{name}": tensor for name, tensor in trained.model.state_dict().items()}
    guesses = read_draft_vocabulary(trained)
    if guesses is not None:
        weights["d2t"], weights["t2d"] = tables_of(guesses, trained.vocab_size)
    return weights
