"""Kernels for CUDA devices, in Triton: attention of a token tree, the moves after a verdict, the
largest logits, and draws under filters.

Importing them needs `triton`, which torch's builds for CUDA bring along.
"""

# Nodes of a tree whose ancestors fit into the bits of one number.
MOST_NODES = 64
MOST_LARGEST = 64  # numbers of a row that `largest` finds
