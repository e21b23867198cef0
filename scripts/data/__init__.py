"""drafthead.scripts.data: verbs that write, answer and show the prompts that heads are trained
on.
"""
