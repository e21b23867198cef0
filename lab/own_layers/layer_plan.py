"""What `drafthead plan-skip` has found so far, in a file from which the search goes on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafthead.contrib.own_layers.layer_choice import LAYERS, OF
from drafthead.heads.errors import UserError
from drafthead.heads.formats.files import read_json
from drafthead.heads.storage.files import write_text
from drafthead.lab.own_layers.layer_search import LayerSet

EXITS, STEPS, MADE_OF = "exits", "steps", "made_of"  # keys of the file


@dataclass
class LayerPlan:
    """Sets of layers of one target, and what they promise."""

    num_layers: int  # of the target
    made_of: dict[str, Any]  # what the promises depend on
    exits: list[LayerSet] = field(default_factory=list)  # after 1, 2, ... layers
    steps: list[LayerSet] = field(
        default_factory=list
    )  # each with a layer less than the one before

    @classmethod
    def begun(cls, path: Path, num_layers: int, made_of: dict[str, Any]) -> "LayerPlan":
        """The plan of a file, or an empty one; raises UserError for a file of anything else."""
        if not path.exists():
            return cls(num_layers, made_of)
        there = read_json(path)
        if there.get(MADE_OF) != made_of:
            raise UserError(
                f"{path} is no plan for this target, these answers and this --limit: choose "
                "another --output"
            )
        try:
            return cls(num_layers, made_of, *(sets_of(there[kind]) for kind in (EXITS, STEPS)))
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: remove it to begin again") from error

    @property
    def layers(self) -> tuple[int, ...]:
        """Those of which the next step leaves out one."""
        return self.steps[-1].layers if self.steps else tuple(range(self.num_layers))

    def best(self, skip: int | None = None) -> LayerSet | None:
        """The set that promises most, maybe of those that leave out so many layers."""
        known = [*self.exits, *self.steps]
        if skip is not None:
            known = [each for each in known if len(each.layers) == self.num_layers - skip]
        return max(known, key=lambda each: each.speedup, default=None)

    def write(self, path: Path, best: LayerSet | None, about: Mapping[str, object]) -> None:
        """Write the file; decoding will read the layers of `best` in it."""
        record = {
            **about,
            OF: self.num_layers,
            **({} if best is None else asdict(best)),
            MADE_OF: self.made_of,
            **{kind: [asdict(each) for each in getattr(self, kind)] for kind in (EXITS, STEPS)},
        }
        write_text(path, json.dumps(record, indent=2) + "\n")


def sets_of(records: list[dict[str, Any]]) -> list[LayerSet]:
    """The inverse of `asdict` for each of several sets."""
    return [LayerSet(**record | {LAYERS: tuple(record[LAYERS])}) for record in records]
