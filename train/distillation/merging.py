"""Joins the shards of a distillation into the file that one process would have written.

Every window of rows has a number, the same in any split, and belongs to one shard. The windows are
copied in the order of their numbers, byte for byte.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from drafthead.core.errors import UserError
from drafthead.core.storage.files import replacing, write_text
from drafthead.train.distillation.distilled_file import (
    AnswerStatistics,
    Shard,
    Written,
    first_difference,
    read_manifest,
    read_written,
)
from drafthead.train.jobs.outputs import lock_path, manifest_path, only_writer


def find_shards(output: Path) -> list[Shard]:
    """All shards of an output, in order, whose files lie beside it.

    Raises UserError if there are none, if some are missing, and if there are those of two splits.
    """
    name = re.compile(rf"{re.escape(output.stem)}\.(\d+)-of-(\d+){re.escape(output.suffix)}")
    folder = output.parent
    matches = map(name.fullmatch, (p.name for p in folder.iterdir()) if folder.is_dir() else ())
    there = {Shard(int(found[1]), int(found[2])) for found in matches if found}
    if not there:
        raise UserError(
            f"there is no shard of {output}: `distill --shard 1/4 --output {output}` writes "
            f"{Shard(1, 4).path(output)}"
        )
    counts = sorted({shard.count for shard in there})
    if len(counts) > 1:
        raise UserError(
            f"beside {output} are shards of {counts[0]} and of {counts[1]} parts: remove those "
            "that do not belong to it"
        )
    every = [Shard(number, counts[0]) for number in range(1, counts[0] + 1)]
    if missing := [shard.path(output).name for shard in every if shard not in there]:
        raise UserError(f"shards of {output} are missing: {', '.join(missing)}")
    return every


OF_SHARDS = ("shard", "plan", "dropped")  # keys of their manifests


@dataclass(frozen=True)
class MergeReport:
    """What was joined."""

    shards: int
    too_long: int  # prompts that no shard could answer
    dropped: int  # rows that were left out because an answer was cut
    statistics: AnswerStatistics


@dataclass(frozen=True)
class _Part:
    """A shard that was read."""

    shard: Shard
    path: Path
    manifest: dict[str, Any]
    written: Written


def merge(output: Path) -> MergeReport:
    """Write `output` from all of its shards, which lie beside it and stay as they are.

    Raises UserError, with the names of the files, if a shard is missing, is not complete, is being
    written or belongs to another distillation, and if `output` is there already.
    """
    shards = find_shards(output)
    paths = [shard.path(output) for shard in shards]
    with ExitStack() as locks:
        for path in (output, *paths):
            locks.enter_context(only_writer(lock_path(path), path))
        if output.exists():
            raise UserError(f"{output} exists already: remove it to join the shards again")
        manifests = [read_manifest(path, "copy it from where it was written") for path in paths]
        _check_alike(shards, paths, manifests)
        contents = [read_written(*each) for each in zip(paths, manifests, strict=True)]
        parts = [_Part(*each) for each in zip(shards, paths, manifests, contents, strict=True)]
        windows = manifests[0]["plan"]["windows"]
        _check_complete(parts, windows)
        _write(output, parts, windows)
    statistics = AnswerStatistics()
    for part in parts:
        statistics.include(part.written.statistics)
    dropped = sum(len(part.written.dropped) for part in parts)
    return MergeReport(len(parts), manifests[0]["plan"]["too_long"], dropped, statistics)


def _check_alike(
    shards: Sequence[Shard], paths: Sequence[Path], manifests: Sequence[dict[str, Any]]
) -> None:
    """Raise UserError unless all files are shards of one distillation."""
    first = manifests[0]
    for shard, path, manifest in zip(shards, paths, manifests, strict=True):
        if manifest.get("shard") != str(shard):
            raise UserError(
                f"{path} was written as shard {manifest.get('shard')}, not {shard}: give each "
                "shard the name that it was written under"
            )
        if "plan" not in manifest:
            raise UserError(f"{path} has no row yet: distil shard {shard} first")
        if difference := first_difference(first, manifest):
            key, one, other = difference
            raise UserError(
                f"{paths[0]} was written with {key} {one!r}, {path} with {other!r}: distil all "
                "shards with the same settings"
            )
        for key, what in (("weights", "weights of the target"), ("plan", "prompts")):
            if manifest.get(key) != first.get(key):
                raise UserError(
                    f"{paths[0]} and {path} were written with other {what}: distil one of them "
                    "again with --overwrite"
                )


def _check_complete(parts: Sequence[_Part], windows: int) -> None:
    """Raise UserError that names the shards which lack some of their windows or have others."""
    unfinished = []
    for part in parts:
        own = {number for number in range(windows) if part.shard.owns(number)}
        there = part.written.batches.keys()
        if foreign := sorted(there - own):
            raise UserError(
                f"{part.path} holds the batch {foreign[0]} of another shard: distil shard "
                f"{part.shard} again with --overwrite"
            )
        if missing := len(own - there):
            unfinished.append(f"{part.path.name} lacks {missing} of its {len(own)} batches")
    if unfinished:
        raise UserError(
            f"not all shards are complete ({', '.join(unfinished)}): give their distill commands "
            "again"
        )


def _write(output: Path, parts: Sequence[_Part], windows: int) -> None:
    """Write the joined file under another name, then its manifest, then rename the file."""
    with replacing(output) as temporary:
        with temporary.open("wb") as file:
            file.writelines(_windows(parts, windows))
        write_text(
            manifest_path(output), dumps(_manifest(parts), indent=2, ensure_ascii=False) + "\n"
        )


def _windows(parts: Sequence[_Part], windows: int) -> Iterator[bytes]:
    """The lines of each window, in the order of their numbers."""
    with ExitStack() as opened:
        files = [opened.enter_context(part.path.open("rb")) for part in parts]
        for number in range(windows):
            place = number % len(parts)
            start, end = parts[place].written.batches[number]
            files[place].seek(start)
            yield files[place].read(end - start)


def _manifest(parts: Sequence[_Part]) -> dict[str, Any]:
    """The manifest of one process: that of any shard, with what all of them have dropped."""
    joined = {key: value for key, value in parts[0].manifest.items() if key not in OF_SHARDS}
    dropped: dict[str, Any] = {}
    for part in parts:
        dropped |= part.manifest.get("dropped", {})
    if dropped:
        joined["dropped"] = dict(sorted(dropped.items(), key=lambda item: int(item[0])))
    return joined
