"""drafthead.infer.timing: what a step of each size takes on this machine."""
