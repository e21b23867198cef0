"""The one reader of configurations: which keys there are, of which type, within which bounds.

A class that inherits `Keys` declares them as fields, and `of` reads them:

>>> class Shape(Keys):
...     hidden_size: Size
...     bias: bool = False
>>> Shape.of({"hidden_size": 64}, Path("config.json"))
Shape(hidden_size=64, bias=False)
>>> Shape.of({"hidden_size": "64"}, Path("config.json"))
Traceback (most recent call last):
drafthead.heads.errors.UserError: config.json: hidden_size is '64', but must be a valid integer
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from drafthead.heads.errors import UserError
from drafthead.heads.formats.printing import shown

# Larger numbers would be a mistake, and might take memory or time without end.
MOST_PARTS = 128  # heads, layers, blocks or steps of a head
MOST_SIZE, MOST_TOKENS = 2**24, 2**20  # a dimension; a vocabulary
Parts = Annotated[int, Field(ge=1, le=MOST_PARTS)]
Size = Annotated[int, Field(ge=1, le=MOST_SIZE)]
Vocabulary = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Token = Annotated[int, Field(ge=0, lt=MOST_TOKENS)]
Slots = Annotated[int, Field(ge=1, le=256)]  # of a block: each attends to every other
Count = Annotated[int, Field(ge=0, le=2**31)]
LayerId = Annotated[int, Field(ge=-1, le=2**10)]
LayerIds = Annotated[list[LayerId], Field(fail_fast=True)]
TargetLayers = Annotated[int, Field(ge=1, le=2**10)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e15)]


class Keys(BaseModel):
    """Keys of a JSON object; null is as good as missing, and what is not declared is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)
    knows_null: ClassVar[bool] = False  # whether null is a value of its own
    _file: Path = PrivateAttr(default=Path())

    @classmethod
    def of(cls, content: Mapping[str, Any], file: Path, within: str = "") -> Self:
        """The keys in `content`, which comes from `file`, there perhaps in the object `within`.

        Raises UserError naming the file, the key, its value and what it must be.
        """
        try:
            given = content if cls.knows_null else without_nulls(content)
            # Validated as JSON, in which a list is as good as a tuple.
            found = cls.model_validate_json(json.dumps(given))
        except (ValidationError, RecursionError) as error:
            raise UserError(f"{file}: {complaint(error, within)}") from error
        found._file = file
        return found

    def check(self, **found: int) -> None:
        """Raise UserError when keys state other sizes than the tensors have."""
        for key, size in found.items():
            claimed = getattr(self, key)
            if claimed not in (None, size):
                raise UserError(f"{self._file} says {key} {claimed}, but the tensors have {size}")


def without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object, and the objects in it, without keys whose value is null."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value is not None
    }


def complaint(error: ValidationError | RecursionError, within: str) -> str:
    """The first problem, in words."""
    if isinstance(error, RecursionError):
        return "objects are nested too deeply"
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, [within, *first["loc"]] if within else first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            return f"{key} is not known"
        case "value_error" | "json_invalid":
            return reason
    wanted = reason.removeprefix("Input should be ").removeprefix("Input should ")
    return f"{key} is {shown(first['input'])}, but must be {wanted}"
