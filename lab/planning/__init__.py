"""drafthead.lab.planning: what a training run will need, before it is spent."""
