"""drafthead.backends.cpu: passes that run our kernels, and these."""
