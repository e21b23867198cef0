"""drafthead.scripts: the verbs of the command line, a file each."""
