"""The code of one layer, and the table from which a compiled pass calls it for each layer."""

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from drafthead.backends.cpu.graph_record import GraphRecord
from drafthead.backends.cpu.layers.callable_code import WHOLE, Input
from drafthead.backends.fingerprint import digest
from drafthead.backends.recorded_calls import LayerTensors, UnlikeError


class LayerTable(nn.Module):
    """The code of each layer and its constants, as `source/layer_call.h` reads them."""

    rows: torch.Tensor  # [L, W]

    def __init__(self, addresses: Sequence[int], constants: Sequence[Sequence[torch.Tensor]]):
        """The addresses and constants of each layer's code."""
        super().__init__()
        handles = [torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(c)) for c in constants]
        # Their memory is not torch's to free.
        freed = finalize(self, release, [handle for row in handles for handle in row])
        freed.atexit = False  # torch itself may be gone by then
        width = 2 + max(len(row) for row in handles)
        rows = torch.zeros(len(handles), width, dtype=torch.int64)
        for number, (address, row) in enumerate(zip(addresses, handles, strict=True)):
            numbers = [address, len(row), *map(address_of, row)]
            rows[number, : len(numbers)] = torch.tensor(numbers)
        self.register_buffer("rows", rows)


def release(handles: list[Any]) -> None:
    """Free the memory of handles."""
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)


def address_of(capsule: Any) -> int:
    """The pointer in one of Python's capsules."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None)


class LayerCode:
    """The code of one layer, which others run with weights of their own."""

    def __init__(self, record: GraphRecord, layer: nn.Module):
        """`record` is that of the layer's graph, made for calls by other code.

        Raises UnlikeError where it reads anything but the tensors of a layer and their sizes.
        """
        self.record, self.order = record, constants_of(record.source)
        self.inputs = inputs_of(record)
        self.fits = conditions(record, self.inputs)
        self.entry = record.loaded(record.constants_for((layer,)))["inductor_entry"]
        library = ctypes.CDLL(self.entry.__self__.__file__)
        self.address = ctypes.cast(library.layer_entry, ctypes.c_void_p).value or 0

    @property
    def description(self) -> str:
        """A short name for the code."""
        return digest([self.record.source, self.record.inputs])

    def constants(self, layer: nn.Module) -> list[torch.Tensor]:
        """The constants of the code for a layer, in the code's order."""
        named = self.record.constants_for((layer,))
        return [named[name] for name in self.order]

    def run(self, tensors: LayerTensors, constants: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output [B, T, D] of a layer."""
        flat = tensors.flat
        given = [
            flat[place] if dim == WHOLE else torch.tensor(flat[place].shape[dim])
            for place, dim in self.inputs
        ]
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([*given, *constants])
        outputs = self.entry(handles)
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(outputs)[0]


def constants_of(source: str) -> list[str]:
    """The names of a graph's constants, in the order in which its code is given them."""
    found = re.search(r"constants_tensor = \[(.*)\]", source)
    return found[1].split(", ") if found else []


class Place:
    """A tensor among a layer's arguments, as torch's expressions for inputs read it."""

    def __init__(self, tensor: int):
        self.tensor = tensor

    def size(self) -> list[Input]:
        """Its sizes."""
        return [Input(self.tensor, dim) for dim in range(8)]


def inputs_of(record: GraphRecord) -> list[Input]:
    """Which tensors and sizes a layer's code is given; raises UnlikeError for anything else."""
    own = [Place(tensor) for tensor in range(4)]
    others = [Place(4 + tensor) for tensor in range(64)]
    try:
        found = eval(f"lambda L: [{', '.join(record.inputs)}]")({"arguments": [*own, others]})
    except (AttributeError, IndexError) as error:
        raise UnlikeError(f"the code of a layer reads {error}") from error
    return [Input(place.tensor) if isinstance(place, Place) else place for place in found]


def conditions(record: GraphRecord, inputs: Sequence[Input]) -> Callable[[list[Any]], bool]:
    """Whether a layer's tensors have the sizes that its code takes for granted.

    Written so that the tracer can read it: the conditions then become those of the whole pass.
    """
    given = [f"x[{i}]" if dim == WHOLE else f"x[{i}].shape[{dim}]" for i, dim in inputs]
    lines = [f"t = [{', '.join(given)}]"]
    lines += [f"{symbol} = {where}" for symbol, where in record.layout.symbols.items()]
    lines += [f"if not ({rule}): return False" for rule in record.layout.rules]
    names: dict[str, Any] = dict(SYMPY_INTERP)
    exec("def fits(x):\n  " + "\n  ".join([*lines, "return True"]), names)
    return names["fits"]
