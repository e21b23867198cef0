"""Speculative decoding: draft heads for frozen language models, and exact decoding with them.

`drafthead.infer` decodes, `drafthead.train` trains, `drafthead.heads` has the heads and
`drafthead.core` what all of them share.
"""

from importlib.metadata import version

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'drafthead' has no attribute {name!r}")
    return version("drafthead")  # asked when needed: reading it takes longer than this file
