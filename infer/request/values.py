"""Values as users pass them: numbers of Python, NumPy or torch, and rows of token ids."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from drafthead.core.errors import UserError

ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def integer(value: object) -> int | None:
    """The integer that `value` is, or None. Booleans, floats and arrays [1] are no integers."""
    if isinstance(value, ARRAYS) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a sequence of things, unlike a text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def rows_of(values: Any, name: str) -> list[list[Any]]:
    """The rows of `values`, which has the form [T] (one row) or [B, T].

    It is a list, tensor or array, or a list of tensors or arrays [T]. Raises UserError, with the
    `name` of the values, for anything else.
    """
    outer = values.tolist() if isinstance(values, ARRAYS) else values
    if is_list(outer):
        rows = [row.tolist() if isinstance(row, ARRAYS) else row for row in outer]
        nested = [is_list(row) for row in rows]
        if not any(nested):
            return [rows]
        if all(nested):
            return [list(row) for row in rows]
    raise UserError(f"{name} must have the form [T] or [B, T], got {type(values).__name__}")


def token_rows(values: Any, name: str) -> list[list[int]]:
    """Token ids [T] or [B, T] as rows; raises UserError, with the prompt's `name`, for others."""
    return [[token_id(value, name) for value in row] for row in rows_of(values, "token ids")]


def token_id(value: object, name: str) -> int:
    """One token id; raises UserError when it is no integer."""
    token = integer(value)
    if token is None:
        raise UserError(f"token ids must be integers, but {name} holds a {type_of(value)}")
    return token


def type_of(value: object) -> str:
    """The type of a value in an error: of lists also that of the first item."""
    name = type(value).__name__
    if is_list(value) and value:
        return f"{name} of {type(value[0]).__name__}"
    return f"{name} of shape {list(value.shape)}" if isinstance(value, ARRAYS) else name
