"""drafthead.heads.graphs: compiled passes, and the kernels that they are made of."""
