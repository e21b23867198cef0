"""Shards of a distillation: which windows of rows each process answers, and into which file."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from drafthead.heads.errors import UserError


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a distillation, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shard of "2/4"; raises UserError for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        shard = cls(*map(int, found.groups())) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise UserError(
                f"a shard is written NUMBER/COUNT, the first of four 1/4, the last 4/4; got {text}"
            )
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def owns(self, window: int) -> bool:
        """Whether the window of this number, from 0, is this shard's: they are dealt in turn."""
        return window % self.count == self.number - 1

    def path(self, output: Path) -> Path:
        """The shard's own file: `answers.2-of-4.jsonl` of `answers.jsonl`."""
        return output.with_name(f"{output.stem}.{self.number}-of-{self.count}{output.suffix}")


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
