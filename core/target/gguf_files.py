"""Targets in GGUF files: which names mean one, and what other software reads of them.

This file imports no library: the command line finds a file before it imports any.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from drafthead.core.errors import UserError
from drafthead.core.storage.disk_cache import cache_folder, cache_or_scratch
from drafthead.core.storage.files import write_json
from drafthead.core.storage.names import FETCHED_MODELS

OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
ACCOUNT_FILE = "gguf.json"  # in a description: what was read of its file
# Goes up when descriptions hold something else of their files: older ones are made again.
VERSION = 5
BEGINNING = 32 * 2**20  # bytes, more than the largest vocabularies take


def model_folder(name: str | Path) -> str | Path:
    """The source that transformers reads for a name: itself, unless it means a GGUF file.

    A `.gguf` file, or a folder that holds one and no other weights, gives a folder with its
    configuration and its tokenizer, which is made the first time. The name of a model that
    `drafthead fetch` has brought means its file, unless a folder of that name here has a model.
    Raises UserError for a file that is missing, damaged or one part of several, or that cannot be
    read here, for a folder with several GGUF files, and for a model that was not fetched yet.
    """
    file = gguf_of(name)
    return name if file is None else description_of(file)


def gguf_of(name: str | Path) -> Path | None:
    """The GGUF file that a target's name means, if it means one; UserError as `model_folder`."""
    path = Path(name)
    return gguf_file(fetched_folder(str(name)) if is_fetched_name(path) else path)


def is_fetched_name(path: Path) -> bool:
    """Whether a path is no model here, but the name of one that `drafthead fetch` brings."""
    models = [*path.glob("*config.json"), *path.glob("*.gguf")]  # adapters have their own
    return str(path) in FETCHED_MODELS and not (path.is_file() or models)


def fetched_folder(name: str) -> Path:
    """The folder of a model of `drafthead fetch`; raises UserError when it is not there."""
    folder = cache_folder("models") / name
    if not any(folder.glob("*.gguf")):
        raise UserError(
            f"cannot load the model {name}: it is not on this machine yet, "
            f"`drafthead fetch {name}` brings it"
        )
    return folder


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means; None when it means something else."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.exists():
            raise UserError(f"cannot load the model {path}: this file does not exist")
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or any(any(path.glob(pattern)) for pattern in OTHER_WEIGHTS):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{path} holds {len(files)} GGUF files: name one of {names}")
    return files[0]


def description_of(file: Path) -> Path:
    """The folder of `gguf_model.describe`, from the cache or written now."""
    base = cache_or_scratch("gguf")
    folder = base / f"{file.stem}-{fingerprint(file)}"
    if not folder.is_dir():
        from drafthead.core.target.gguf_model import describe  # of no use to other targets

        with TemporaryDirectory(dir=base) as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            write_json(made / ACCOUNT_FILE, describe(file, made))
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    return folder


def fingerprint(file: Path) -> str:
    """16 hexadecimal digits that change with what a file says, and with the software that reads it.

    Of two fine-tunes that say the same, the description is the same.
    """
    about = f"{file.stat().st_size} {version('transformers')} {version('gguf')} {VERSION}"
    digest = hashlib.blake2b(about.encode(), digest_size=8)
    with file.open("rb") as opened:
        digest.update(opened.read(BEGINNING))
    return digest.hexdigest()
