"""Kernels for processors with AVX512-BF16, which torch's code generator compiles into a pass.

Importing them takes seconds, as they reach into that generator: only `heads.graphs.compiled` does.
"""
