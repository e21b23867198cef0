"""drafthead.scripts.reports: what verbs measured, as tables, files and pictures."""
