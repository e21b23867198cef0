"""Numbers as users pass them: Python's, NumPy's, or a tensor without dimensions."""

import numpy as np
import torch

from drafthead.heads.errors import UserError

ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def integer(value: object) -> int | None:
    """The integer that `value` is, or None. Booleans, floats and arrays [1] are no integers."""
    if isinstance(value, ARRAYS) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def integer_option(name: str, value: object) -> int:
    """The integer given for an option; raises UserError, with the option's name, if it is none."""
    number = integer(value)
    if number is None:
        raise UserError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    return number


def number_option(name: str, value: object) -> float:
    """The number given for an option; raises UserError, with the option's name, if it is none."""
    number = value.item() if isinstance(value, ARRAYS) and value.ndim == 0 else value
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise UserError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return number
