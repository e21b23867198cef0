"""Checkpoints of other software, and our own: recognised, read, written and checked."""

# Imported in the order in which `recognises` is asked.
from drafthead.heads.formats import (  # noqa: F401  (they register themselves)
    dflash,
    drafthead,
    eagle,
    eagle3,
    hydra,
    medusa,
    mlp_speculator,
    mtp,
    speculators,
)
from drafthead.heads.formats.base import FORMATS
from drafthead.heads.formats.loading import build_head, load_head, read_foreign, recognised

__all__ = ["FORMATS", "build_head", "load_head", "read_foreign", "recognised"]
