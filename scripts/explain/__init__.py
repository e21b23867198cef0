"""drafthead.scripts.explain: verbs that show where the speed comes from."""
