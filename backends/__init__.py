"""drafthead.backends: compiled code for processors, recordings and kernels for CUDA devices."""
