"""What a run can train, by the name of its family: draft heads and draft models."""

from drafthead.heads.base import HEADS, DraftHead, head_family
from drafthead.heads.errors import UserError
from drafthead.train.draft_models.student import FAMILY, Student


def trainable(family: str) -> type[DraftHead]:
    """The class of a family; raises UserError that lists the known ones."""
    if family == FAMILY:
        return Student
    if family not in HEADS:
        known = ", ".join(sorted([*HEADS, FAMILY]))
        raise UserError(f"unknown head family {family!r}; known families: {known}")
    return head_family(family)
