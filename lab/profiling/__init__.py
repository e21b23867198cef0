"""drafthead.lab.profiling: passes alone, and what each size of tree costs."""
