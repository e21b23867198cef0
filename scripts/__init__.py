"""drafthead.scripts: the verbs of the command line, one file a verb, in rooms by purpose."""
