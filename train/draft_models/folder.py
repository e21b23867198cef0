"""A trained draft model on disk: what transformers loads, with its tokenizer and its origin."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.frequent_tokens import DRAFT_IDS, DRAFT_IDS_FILE
from drafthead.train.draft_models.student import Student

ORIGIN_FILE = "training.json"


def save_draft_model(
    student: Student, folder: Path, target: Target, origin: dict[str, Any]
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
        write_text(Path(temporary) / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
        for file in Path(temporary).iterdir():
            shutil.move(file, folder / file.name)


def load_student(student: Student, folder: Path) -> None:
    """Give a fresh student the weights of a draft model in a folder; its guesses stay its own.

    Raises UserError when that is no draft model of the same shape.
    """
    trained = Target.from_pretrained(folder, "float32", "cpu").model
    wanted, found = student.model.state_dict(), trained.state_dict()
    for name in sorted({*wanted, *found}):
        shapes = [tuple(part[name].shape) if name in part else None for part in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"train.init_from={folder} has another shape: {name} is {shapes[0]} there, and "
                f"{shapes[1]} by the section head"
            )
    student.model.load_state_dict(found)
