"""drafthead.lab.profiling: where the time of a step goes."""
