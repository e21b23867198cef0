"""drafthead.heads: the frozen target, token trees, draft heads and their checkpoints."""
