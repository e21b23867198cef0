"""Whether the first stage notices wrong code: `python tests/mutations.py [NAME ...]`.

Each mutation of `stages.yaml` is made in a copy of the project, where one test has to fail.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from stages import Mutation, read_stages

ROOT = Path(__file__).parents[1]
FOLDERS = (
    ".typing", "backends", "benchmarks", "configs", "contrib", "core", "docs", "heads", "infer",
    "lab", "scripts", "serve", "tests", "train",
)  # fmt: skip
LINKED = ("assets",)  # large, and nothing writes there
FAILED = 1  # tests, says pytest; other numbers are of other faults


def copied(folder: Path) -> None:
    """Copy the project's code and tests."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def status(folder: Path, test: str) -> int:
    """What pytest ends with when it runs a test of a copy."""
    # Two copies of a package would be found, if the original's stayed in the path.
    environment = {**os.environ, "PYTHONPATH": str(folder / ".typing")}
    options = "-q", "-x", "-n", "0", "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options, test]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


def noticed(mutation: Mutation, folder: Path) -> str | None:
    """None if the test fails with the mutation in the copy, or what is wrong instead."""
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f"the text stands {text.count(mutation.old)} times in {mutation.file}, not once"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        found = status(folder, mutation.fails)
    finally:
        path.write_text(text)
    return None if found == FAILED else f"pytest ends with {found} for {mutation.fails}"


def main(names: list[str]) -> int:
    """Try the mutations of these names, or all; gives the number of those nobody noticed."""
    known = read_stages()[1]
    if unknown := set(names) - {m.name for m in known}:
        sys.exit(f"stages.yaml has no entry of the name {unknown.pop()!r}")
    chosen = [m for m in known if not names or m.name in names]
    missed = 0
    with TemporaryDirectory() as folder:
        copied(Path(folder))
        for mutation in chosen:
            complaint = noticed(mutation, Path(folder))
            missed += complaint is not None
            print(f"{mutation.name} ({mutation.file}): {complaint or 'noticed'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
