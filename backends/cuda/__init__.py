"""Kernels for CUDA devices, in Triton: attention of a token tree, and the moves after a verdict.

Importing them needs `triton`, which torch's builds for CUDA bring along.
"""

# Nodes of a tree whose ancestors fit into the bits of one number.
MOST_NODES = 64
