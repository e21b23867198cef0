"""Graphs whose code is called by the code of other graphs, not by Python."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

# The code of a graph releases Python's lock, but such a caller has done so already.
RELEASE = "py::gil_scoped_release_simple release;"
ENTRY = "void inductor_entry_impl("
NAMED = """void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*);
extern "C" __attribute__((visibility("default")))
void layer_entry(AtenTensorHandle* inputs, AtenTensorHandle* outputs) {
    inductor_entry_impl(inputs, outputs);
}
"""
FROM_PYTHON = "custom_op_wrapper"  # calls Python, and needs its lock
WHOLE = -1  # in place of a dimension: the tensor itself


class Input(NamedTuple):
    """An input of a graph: one of the tensors that it is given, or a size of it."""

    tensor: int
    dim: int = WHOLE


def for_calls(source: str) -> str:
    """The source of a graph that other compiled code can call, as `layer_entry`.

    Raises ValueError for source of a form that is not known.
    """
    if source.count(RELEASE) != 1 or source.count(ENTRY) != 1 or FROM_PYTHON in source:
        raise ValueError("the code of a layer has another form than is known")
    return source.replace(RELEASE, "").replace(ENTRY, NAMED + ENTRY)


@contextmanager
def callable_in_code() -> Iterator[None]:
    """Within, torch compiles the code that it generates so that other code can call it."""
    from torch._inductor.codecache import CppWrapperCodeCache  # takes seconds

    load = CppWrapperCodeCache.load_pybinding

    def loaded(*, main_code: str, **options: Any) -> Any:
        return load(main_code=for_calls(main_code), **options)

    with patch.object(CppWrapperCodeCache, "load_pybinding", loaded):
        yield
