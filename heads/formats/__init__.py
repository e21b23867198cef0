"""Checkpoints of other software, and our own: recognised, read, written and checked."""

# In the order in which they are asked: ours says so itself, and others are told by their tensors.
from drafthead.heads.formats import (  # noqa: F401  (they register themselves)
    dflash,
    drafthead,
    dspark,
    eagle,
    eagle3,
    hydra,
    medusa,
    mlp_speculator,
    speculators,
)
from drafthead.heads.formats.base import FORMATS
from drafthead.heads.formats.loading import build_head, load_head, read_foreign, recognised

__all__ = ["FORMATS", "build_head", "load_head", "read_foreign", "recognised"]
