"""drafthead.backends: kernels for processors, recordings and kernels for CUDA devices."""
