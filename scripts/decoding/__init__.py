"""drafthead.scripts.decoding: verbs that decode."""
