"""Layers that differ in their weights alone, compiled once.

To be deleted as soon as torch does it: `torch.compiler.nested_compile_region` is this feature, and
under `cpp_wrapper`, which compiled passes need, it raised NotImplementedError until a change of
torch in August 2026. With a release that has it, mark the layers of a model so, compare the times
of a cold compilation, and remove this folder and `kernels/layer_call.py`: they read and change text
that torch generates, which may look otherwise in any release.
"""
