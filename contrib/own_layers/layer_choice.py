"""Which of its own layers a target drafts with, as users name them."""

import re
from collections.abc import Sequence
from pathlib import Path

from drafthead.heads.errors import UserError
from drafthead.heads.formats.files import read_json
from drafthead.heads.target.part import refuse_other_layers
from drafthead.heads.target.target import Target

LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")
LAYERS, OF = "layers", "num_layers"  # what a file of `drafthead plan-skip` is read for


def chosen_layers(choice: str | Path, target: Target) -> tuple[int, ...]:
    """The layers of a list such as ``0-7,20-29``, or of a file that `drafthead plan-skip` wrote.

    Raises UserError for what is neither, and for layers that are no part of the target.
    """
    path = Path(choice)
    if not LIST.fullmatch(str(choice)):
        return layers_in(path, target)
    layers: list[int] = []
    for part in str(choice).split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    refuse_other_layers(target, layers, named=str(choice))
    return tuple(layers)


def as_list(layers: Sequence[int]) -> str:
    """Layers in ascending order as `chosen_layers` reads them: ``0-2,5`` for 0, 1, 2 and 5."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def layers_in(path: Path, target: Target) -> tuple[int, ...]:
    """The layers of a file of `drafthead plan-skip`; raises UserError for any other."""
    if not path.is_file():
        raise UserError(
            f"draft_layers={path} is neither a list of layers, such as 0-7,20-29, nor a file"
        )
    plan = read_json(path)
    layers = plan.get(LAYERS)
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise UserError(f"{path} lists no {LAYERS!r}: it is no file of drafthead plan-skip")
    if plan.get(OF) != target.num_layers:
        raise UserError(
            f"{path} was made for a target of {plan.get(OF)} layers, and this one has "
            f"{target.num_layers}: run drafthead plan-skip for it"
        )
    refuse_other_layers(target, layers, named=f"{layers} in {path}")
    return tuple(layers)
