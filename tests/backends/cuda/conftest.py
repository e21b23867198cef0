"""Where the kernels run that are tested here: `KERNELS_ON` is `cpu` (they are interpreted), `cuda`,
`none` (they are compiled only), or not set.

Triton decides when it is imported whether it interprets kernels, so all tests of kernels have
processes of their own, which test_kernels.py starts.
"""

import os
from pathlib import Path

DEVICE = os.environ.get("KERNELS_ON")
STARTER = "test_kernels.py"
NEED_NONE = {STARTER, "test_fingerprint.py", "test_recorded.py", "test_compiled_layers.py"}
others = sorted({path.name for path in Path(__file__).parent.glob("test_*.py")} - NEED_NONE)
collect_ignore = [STARTER] if DEVICE else others


def mend_interpreter() -> None:
    """Let it take loop bounds from memory with numpy 2.4, and multiply bfloat16 as numbers."""
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        # A bound is an array of one number, which numpy does not turn into an integer any more.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def product(self, a, b, *more):
        return dot(self, *(as_numbers(self, factor) for factor in (a, b)), *more)

    def as_numbers(builder, factor):
        tl = interpreter.tl
        return builder.cast_impl(factor, tl.float32) if factor.dtype == tl.bfloat16 else factor

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = product


if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    mend_interpreter()
