"""`drafthead train`: the training entry point, in this process."""

from drafthead.train.train_heads import main

__all__ = ["main"]
