"""drafthead.backends.cpu: compiled passes, and the kernels that they are made of."""
