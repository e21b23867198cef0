"""Kernels for CUDA devices, in Triton: attention of a token tree, and the moves after a verdict.

Importing them needs `triton`, which torch's builds for CUDA bring along.
"""
