"""Fields of a head's configuration that only its training reads.

Heads that differ in these alone draft with the same code, and take the same time for it, so that
they share compiled graphs and measured costs.
"""

from dataclasses import fields
from typing import Annotated, Any, TypeVar

Value = TypeVar("Value")
MARK = "only training reads it"
ForTraining = Annotated[Value, MARK]  # the type of such a field


def is_for_training(annotation: Any) -> bool:
    """Whether a field of this type is read by training alone."""
    return MARK in getattr(annotation, "__metadata__", ())


def drafting_fields(config: Any) -> dict[str, Any]:
    """The values of a dataclass by their names, without those that only training reads."""
    read = (field.name for field in fields(config) if not is_for_training(field.type))
    return {name: getattr(config, name) for name in read}
