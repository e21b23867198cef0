"""The argument in which a model of transformers takes its keys and values.

transformers 5.24 calls it `cache`. Before, it was `past_key_values`, as it still is in code from
elsewhere.
"""

import inspect
from collections.abc import Callable

# The old name first: what takes both has something else in the other.
NAMES = ("past_key_values", "cache")


def cache_argument(function: Callable[..., object]) -> str:
    """The name of the argument, of a `forward` or another function; empty where it takes none."""
    takes = inspect.signature(function).parameters
    return next((name for name in NAMES if name in takes), "")
