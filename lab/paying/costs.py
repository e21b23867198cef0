"""What a step of decoding takes on a machine, by batch, context and tree: a curve through points.

Points come from `explain tree` or benchmarks/gpu.py, or are written by hand.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from drafthead.core.errors import UserError
from drafthead.heads.formats.files import read_json
from drafthead.infer.timing.step_timing import PROMPT_TOKENS

# Of the trees in benchmarks/gpu.py, whose records name nodes alone; deeper ones have DEEPEST.
DEPTHS, DEEPEST = {4: 3, 8: 4}, 6
ALONE, MANY = 256, 1024  # committed tokens there, of one row and of batches
ACCOUNTS = ("seconds", "peak_gib")  # by the same names, of what measuring took
# A pass that takes so much longer than a whole plain step was timed where decoding does not run it.
IMPOSSIBLE = 1.5


class StepTime(NamedTuple):
    """Milliseconds of a step of `batch` rows, after `columns` tokens each; depth 0 drafts none."""

    nodes: int
    ms: float
    depth: int = 0
    batch: int = 1
    columns: int = ALONE


class CostCurve:
    """The time of any step: what grows with its tokens, with what they attend to, and with levels.

    A step over t tokens (rows times nodes) takes a piecewise linear, never falling time, and more
    for each token of the cache, for each cached token and node, for each drafted level, and for
    each level and row. The shares are those that fit the points best, none of them negative.
    """

    def __init__(self, points: Sequence[StepTime]):
        """Raises UserError where plain decoding of one row, or anything beside it, is missing."""
        plain = any(p.nodes == 1 and not p.depth for p in points)
        self.knots = np.array(sorted({p.batch * p.nodes for p in points}), float)
        if not plain or len(self.knots) < 2 or min(p.ms for p in points) <= 0:
            raise UserError(
                "a cost curve needs the milliseconds of plain decoding (nodes 1) and of steps with "
                f"more tokens, all above 0; it has {len(points)} steps, of "
                f"{', '.join(f'{knot:.0f}' for knot in self.knots)} tokens"
            )
        self.longest = max(p.columns for p in points)
        ms = np.array([point.ms for point in points])
        parts = np.array([self._parts(p.batch, p.columns, p.nodes, p.depth) for p in points])
        self.shares, _ = nnls(parts / ms[:, None], np.ones(len(ms)))

    def _parts(self, batch: int, columns: int, nodes: int, depth: int) -> list[float]:
        """Return what a step has of each share."""
        starts, widths = self.knots[:-1], np.diff(self.knots)
        climbed = np.clip((batch * nodes - starts) / widths, 0, 1)
        cached = batch * columns / 1e4
        return [1.0, *climbed, cached, cached * nodes / 10, depth, depth * batch / 10]

    def ms(self, batch: int, columns: int, nodes: int, depth: int) -> float:
        """Milliseconds of a step."""
        return float(np.dot(self._parts(batch, columns, nodes, depth), self.shares))

    def covers(self, batch: int, nodes: int) -> bool:
        """Tell whether steps of so many tokens were measured."""
        return batch * nodes <= self.knots[-1]


def read_costs(files: Sequence[Path], model: str | None, family: str) -> list[StepTime]:
    """The steps in files of any of the forms; `model` names one of those in benchmarks/gpu.py's.

    Of the heads there, those of the given family count. Raises UserError for a file of no form.
    """
    points: list[StepTime] = []
    of_a_gpu: dict[str, Any] = {}
    for file in files:
        found = read_json(file)
        try:
            if "steps" in found:
                points += [StepTime(**step) for step in found["steps"]]
            elif "sizes" in found:
                points += tree_points(found)
            else:
                of_a_gpu |= dict(flat(found))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"{file} holds no costs of steps: {error!r}") from error
    if of_a_gpu:
        points += gpu_points(of_a_gpu, model, family)
    return points


def tree_points(found: Mapping[str, Any]) -> list[StepTime]:
    """Steps of `explain tree --output`."""
    rows = int(found["rows_timed"])
    return [
        StepTime(s["nodes"], 1000 * s["step_seconds"], s["depth"], rows, PROMPT_TOKENS)
        for s in found["sizes"]
    ]


def flat(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return what benchmarks/gpu.py measured, by name; a later phase goes before an earlier one."""
    for name, value in found.items():
        yield name, value
        if isinstance(value, Mapping) and name not in ACCOUNTS:
            yield from flat(value)


def gpu_points(named: Mapping[str, Any], model: str | None, family: str) -> list[StepTime]:
    """Steps of a model such as `8B compiled layers` in what benchmarks/gpu.py measured."""
    steps = {
        name: value["step_ms"]
        for name, value in named.items()
        if isinstance(value, Mapping) and "step_ms" in value
    }
    if model not in steps:
        known = sorted(name for name in steps if re.search(r" (as it is|recorded|layers)$", name))
        if not known:
            raise UserError(
                "no file of --cost holds steps: give what explain tree wrote with --output, or "
                ' {"steps": [{"nodes": 1, "ms": 9.9}, ...]}'
            )
        raise UserError(f"--model {model or ''} must be one of {', '.join(known)}")
    plain, passes = steps[model], named.get(f"{model} ms", {})
    if not passes or passes["1"] > IMPOSSIBLE * plain:
        passes = {"1": plain}
    points = [StepTime(int(n), plain * ms / passes["1"]) for n, ms in passes.items()]
    shape, _, way = model.partition(" ")
    for name, ms in steps.items():
        if head := re.fullmatch(rf"{shape} {family} {way} N=(\d+)", name):
            nodes = int(head[1])
            points.append(StepTime(nodes, ms, DEPTHS.get(nodes, DEEPEST)))
        elif rows := re.fullmatch(rf"{shape} (plain|16 nodes) B=(\d+)", name):
            nodes = 16 if rows[1] == "16 nodes" else 1
            points.append(StepTime(nodes, ms, 0, int(rows[2]), MANY))
        elif long := re.fullmatch(rf"{shape} plain S=(\d+)", name):
            points.append(StepTime(1, ms, 0, 1, int(long[1])))
    return points
