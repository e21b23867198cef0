"""C++ kernels for processors with AVX512-BF16 or AVX2: torch's code generator compiles them into a
pass.

A module holds an operation and its place in the generated code; the C++ is in `source/`, where a
folder holds what is written for some instructions. What takes longest to compile is in a `library`
that all graphs share. Importing them takes seconds, as they reach into that generator:
`backends.compiled` does it when it needs them.
"""
