"""The parts of a distillation that several processes wrote, as one source of rows.

`distill --shard 2/4 --output answers.jsonl` writes `answers.2-of-4.jsonl`. Where `answers.jsonl`
is not there, its name means all of its shards.
"""

import re
from pathlib import Path

from drafthead.core.errors import UserError
from drafthead.train.jobs.outputs import read_manifest

OF_ONE = {"shard", "dropped", "complete"}  # keys in which the manifests of shards may differ
COPY = "copy it from where the shard was written"


def shard_path(output: Path, number: int, count: int) -> Path:
    """The file of a shard: `answers.2-of-4.jsonl` of `answers.jsonl`."""
    return output.with_name(f"{output.stem}.{number}-of-{count}{output.suffix}")


def shards_of(output: Path) -> list[Path]:
    """The files of all shards of an output, in order; none where there is no shard.

    Raises UserError, with the names of the files, if a shard is missing, is not complete, was
    written under another name or with other settings, and if there are those of two splits.
    """
    name = re.compile(rf"{re.escape(output.stem)}\.(\d+)-of-(\d+){re.escape(output.suffix)}")
    folder = output.parent
    matches = map(name.fullmatch, (p.name for p in folder.iterdir()) if folder.is_dir() else ())
    counts = sorted({int(found[2]) for found in matches if found})
    if len(counts) > 1:
        raise UserError(
            f"beside {output} are shards of {counts[0]} and of {counts[1]} parts: remove those "
            "that do not belong to it"
        )
    paths = [shard_path(output, n, count) for count in counts for n in range(1, count + 1)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise UserError(f"shards of {output} are missing: {', '.join(missing)}")
    _check_alike(paths)
    return paths


def _check_alike(paths: list[Path]) -> None:
    """Raise UserError unless all files are complete shards of one distillation."""
    manifests = [read_manifest(path, COPY) for path in paths]
    for number, (path, manifest) in enumerate(zip(paths, manifests, strict=True), start=1):
        shard, first = f"{number}/{len(paths)}", manifests[0]
        if manifest.get("shard") != shard:
            raise UserError(
                f"{path} was written as shard {manifest.get('shard')}, not {shard}: give each "
                "shard the name that it was written under"
            )
        if not manifest.get("complete"):
            raise UserError(f"{path} is not complete: give its distill command again")
        for key in first | manifest:  # in the order in which they were written
            one, other = first.get(key), manifest.get(key)
            if key not in OF_ONE and one != other:
                raise UserError(
                    f"{paths[0]} was written with {key} {one!r}, {path} with {other!r}: distil all "
                    "shards with the same settings, prompts and target"
                )
