"""drafthead.scripts.data: verbs about what heads learn from."""
