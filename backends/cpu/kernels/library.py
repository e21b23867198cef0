"""Kernels that are compiled once, for the graphs of all models.

A product has code of its own for each number of rows, which takes longer to compile than the rest
of most graphs. A graph declares such a kernel and finds it among the functions of the process. The
library is compiled while the first graph is traced, and then kept in torch's cache.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, RTLD_GLOBAL
from functools import cache
from typing import Any

from torch._inductor.codecache import CppCodeCache

from drafthead.backends.cpu.kernels.template import text_of

HEADERS = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <c10/util/Unroll.h>
"""


class Library(CppCodeCache):
    """torch's cache of compiled code, with functions that other compiled code can call."""

    cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012  (as in torch)

    @staticmethod
    def _load_library_inner(path: str, key: str) -> CDLL:
        return CDLL(path, RTLD_GLOBAL)


@cache
def declarations() -> str:
    """C++ that declares the functions of the library, in a namespace of this version."""
    version = hashlib.sha256(text_of("library.h").encode()).hexdigest()[:16]
    return f"#define DRAFTHEAD_LIBRARY drafthead_{version}\n{text_of('declared.h')}"


@cache
def begun() -> Callable[[], CDLL]:
    """Begin to compile the library, where it is not in the cache yet.

    The result waits for it, and makes its functions known to code that is loaded from then on; it
    raises InductorError where they cannot be compiled.
    """
    code = HEADERS + declarations() + text_of("library.h")
    compiling = ThreadPoolExecutor(1)
    load: Callable[[], CDLL] = Library.load_async(code, submit_fn=compiling.submit)
    compiling.shutdown(wait=False)
    return load
