"""C++ kernels for x86 processors with AMX, AVX512 or AVX2, as operations of torch.

`operations` says what each computes. The C++ is in `source/`, where a folder holds what is written
for some instructions, see `kernel_set`, and is compiled once for all models, see `library`.
"""
