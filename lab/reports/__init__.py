"""drafthead.lab.reports: what verbs measured, as tables, files and pictures."""
