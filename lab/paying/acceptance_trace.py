"""An acceptance trace: what trees of each size accept of given answers. Nothing in it is of a
machine, so it can be combined with the costs of any.

Decoding is played again, as evaluation does: from the ranks of the true tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path as FilePath
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.core.trees.tree import Path, TreeShape
from drafthead.heads.formats.files import read_json
from drafthead.heads.growing.static import grow_tree
from drafthead.train.learning.ranks import Ranked, accepted_in, count_paths

NODES = (4, 8, 16, 32, 64)  # of trees, the root included; and chains of any length


@dataclass(frozen=True)
class TracedAnswer:
    """The steps that decode one answer, with each of the trace's trees."""

    category: str | None  # the kind of request, where its row says it
    temperature: float | None  # at which it was drawn, likewise; 0 is greedy
    context: int  # tokens before the root of the first step
    lengths: list[list[int]]  # for each tree: tokens that each step brings, the bonus included


@dataclass(frozen=True)
class AcceptanceTrace:
    """The acceptance of a head, without hardware."""

    target: str
    head: str
    family: str  # of the head
    trees: list[tuple[int, int]]  # nodes with the root, depth
    answers: list[TracedAnswer]
    version: Literal[1] = 1

    def write(self, file: FilePath) -> None:
        """Write the JSON file."""
        write_text(file, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: FilePath) -> "AcceptanceTrace":
        """Read what `write` wrote; raises UserError for anything else."""
        try:
            found = TypeAdapter(cls).validate_python(read_json(file))
        except ValidationError as error:
            complaint = error.errors()[0]
            place = ".".join(map(str, complaint["loc"]))
            raise UserError(
                f"{file} is not an acceptance trace: {place}: {complaint['msg']}; write one with "
                "drafthead head evaluate --trace FILE"
            ) from error
        if not found.answers:
            raise UserError(f"{file} has no answers: evaluate a head on more of them")
        return found


def trees_of(depth: int) -> list[tuple[int, int]]:
    """Nodes and depth of the trees that are traced for a head that drafts `depth` tokens."""
    chains = [(length + 1, length) for length in range(1, depth + 1)]
    trees = [(n, levels) for n in NODES for levels in range(1, depth + 1) if n > levels + 1]
    return sorted({*chains, *trees})


def traced(sources: Sequence[Ranked]) -> tuple[list[tuple[int, int]], list[TracedAnswer]]:
    """The trees, and the answers of all sources as their steps decode them.

    Trees are the best static ones of their sizes for these ranks, and chains of each length.
    """
    sizes = trees_of(sources[0].ranks.ranks.shape[1])
    answers = [answer for source in sources for answer in answers_of(source, sizes)]
    return sizes, answers


def answers_of(source: Ranked, sizes: Sequence[tuple[int, int]]) -> Iterator[TracedAnswer]:
    """The answers of a source, in the order of its rows."""
    ranked, data = source
    counts = count_paths(ranked.ranks)
    trees = [tree_of(counts, *size) for size in sizes]
    kinds, temperatures = (data.sequences.by_row(name) for name in ("category", "temperature"))
    rows = list(map(tuple, ranked.ranks.tolist()))
    numbers = range(len(rows))

    def run(number: int) -> Any:
        """Return what all anchors of one answer share."""
        return ranked.conversations[number], ranked.anchors[number] - number

    for ((row, segment), _), places in groupby(numbers, run):
        first, *rest = places
        here = data.rows[row]
        before = sum(int(data.sequences.lengths[n]) for n in here[: segment - 1])
        own = here[segment - 1]
        if rest:  # no step begins at the last token
            yield TracedAnswer(
                kinds[own],
                temperatures[own],
                ranked.anchors[first] + 1 - before,
                [steps([accepted_in(t, rows[n]) for n in (first, *rest)]) for t in trees],
            )


def tree_of(counts: dict[Path, int], nodes: int, depth: int) -> set[Path]:
    """The paths of a chain where a size has no room for more, else of the best tree of that size.

    `counts` are those of `count_paths`.
    """
    is_chain = nodes == depth + 1
    shape = TreeShape.chain(depth) if is_chain else grow_tree(counts, nodes, depth)
    return {(), *shape.paths}


def steps(accepted: Sequence[int]) -> list[int]:
    """The tokens of each step, where so many would be accepted after each token of an answer.

    The last token ends the answer. Accepted 2 0 0 0 1: steps of 3 and 1 token.
    """
    found, place, end = [], 0, len(accepted) - 1
    while place < end:
        found.append(min(accepted[place] + 1, end - place))
        place += found[-1]
    return found
