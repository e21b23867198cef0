"""drafthead.scripts.head: verbs about a trained head."""
