"""Layers that are alike are compiled once: each runs the code of the first with its own weights.

Tracing and compiling a model takes time in proportion to its layers, a minute or two for thirty. So
an uncompiled pass is recorded, to see what each layer is given. One layer of each kind is compiled,
and its code, with the weights of every other layer of that kind, has to give what that layer gave.
The whole pass is then compiled with calls of this code in place of its layers.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drafthead.backends.cpu.graph_record import GraphRecord, has_gap
from drafthead.backends.cpu.layers.layer_code import LayerCode, LayerTable
from drafthead.backends.fingerprint import UndescribedError, described, digest, without_numbers
from drafthead.backends.recorded_calls import (
    LayerCall,
    LayerFunction,
    LayerTensors,
    UnlikeError,
    recorded,
    replaced,
    tensors_of,
)
from drafthead.core.errors import UserError

FEWEST = 8  # layers; fewer are compiled as quickly with the pass
# A layer's code may miss what the layer adds to its input by this share: bfloat16, or bytes.
TOLERATED = 0.05
# The dimensions of what layers are given, by their number: positions, rotations, masks.
FORMS = {1: ("T",), 2: ("B", "T"), 3: ("B", "T", "."), 4: ("B", ".", "T", "S")}

# Why layers cannot be compiled on their own: what they are, torch's ways, or our reading of these.
OBSTACLES = (UnlikeError, UndescribedError, UserError, ImportError, AttributeError, ValueError)

logger = logging.getLogger(__name__)
# Compiles a function for arguments: (function, its dims, what it reads, arguments) -> record.
Compile = Callable[[Any, dict[str, Any], Sequence[Any], Sequence[Any]], GraphRecord | None]


class LayerStack:
    """The layers of a model in passes of one kind, ready to be called by their compiled code."""

    def __init__(self, layers: Sequence[nn.Module], calls: Sequence[LayerCall], compile: Compile):
        """`calls` are those of the layers in an uncompiled pass of that kind.

        Raises UnlikeError where nothing would be gained, or where the code gives something else
        than a layer gave.
        """
        self.layers, self.in_tuple = layers, [call.in_tuple for call in calls]
        kinds = [kind_of(layer, call) for layer, call in zip(layers, calls, strict=True)]
        if 2 * len(set(kinds)) > len(kinds):
            raise UnlikeError("the layers are of too many kinds")
        known: dict[str, LayerCode] = {}
        constants = []
        for layer, call, kind in zip(layers, calls, kinds, strict=True):
            if kind not in known:
                known[kind] = compiled_layer(layer, call, compile)
            constants.append(known[kind].constants(layer))
            check_output(known[kind].run(call.tensors, constants[-1]), call)
        self.codes = [known[kind] for kind in kinds]
        self.table = LayerTable([code.address for code in self.codes], constants)

    @property
    def description(self) -> list[str]:
        """What the code of a pass depends on, that is made of calls of these layers."""
        return [code.description for code in self.codes]

    def called(self) -> AbstractContextManager[None]:
        """Within, layers that are traced become calls of their code."""
        return replaced(self.layers, self._call)

    def _call(self, number: int, _: Callable[..., Any]) -> Callable[..., Any]:
        code, in_tuple = self.codes[number], self.in_tuple[number]
        places = [part for pair in code.inputs for part in pair]

        def call(*args: Any, **kwargs: Any) -> Any:
            flat = tensors_of(number, (args, kwargs)).flat
            assert code.fits(flat)
            output = torch.ops.drafthead.layer(flat, self.table.rows, number, places)
            return (output,) if in_tuple else output

        return call


def stack_for(
    layers: Sequence[nn.Module], run: Callable[[], Any], compile: Compile
) -> LayerStack | None:
    """The layers of a pass, ready to be called; None where they have to be compiled with it.

    `run` is the pass, uncompiled.
    """
    try:
        # Importing it takes seconds, and makes calls of layers known to torch.
        from drafthead.backends.cpu.kernels import layer_call  # noqa: F401

        return LayerStack(layers, recorded(layers, run), compile)
    except OBSTACLES as reason:
        tell_of_all_layers(reason)
        return None


def tell_of_all_layers(reason: Exception) -> None:
    """Say why a pass is compiled with all its layers."""
    logger.info("all layers are compiled, which takes longer: %s", reason)


def kind_of(layer: nn.Module, call: LayerCall) -> str:
    """Equal for layers that differ in their weights alone, in one pass."""
    shapes = [list(tensor.shape) for tensor in call.tensors.flat]
    return digest([without_numbers(described(layer)), call.form, shapes])


def compiled_layer(layer: nn.Module, call: LayerCall, compile: Compile) -> LayerCode:
    """The code of a layer; raises UnlikeError where it cannot be compiled for calls."""
    tensors = call.tensors
    mask, others = dims_of(tensors)
    dims = {"hidden": "B T .", "columns": "T", "others": others}
    dims |= dict.fromkeys(("keys", "values"), "B . C .")
    function = LayerFunction(layer, call.form, mask)
    record = compile(function.run, dims, (layer, json.dumps(call.form), mask), tensors)
    if record is None or has_gap(list(record.constants.values())):
        raise UnlikeError("the constants of a layer do not come from its weights alone")
    return LayerCode(record, layer)


def dims_of(tensors: LayerTensors) -> tuple[int, tuple[str, ...]]:
    """The place of the mask among the other tensors, and the dimensions of all these.

    Raises UnlikeError for tensors of other forms than the masks and positions of a pass.
    """
    batch, length, _ = tensors.hidden.shape
    masks = [n for n, t in enumerate(tensors.others) if t.dim() == 4 and t.shape[2] == length]
    if not masks:
        raise UnlikeError("a layer is given no mask")
    columns = tensors.others[masks[0]].shape[-1]
    sizes = {"B": (batch, 1), "T": (length,), "S": (columns,)}
    found = []
    for tensor in tensors.others:
        letters = FORMS.get(tensor.dim())
        if letters is None:
            raise UnlikeError(f"a layer is given a tensor of {tensor.dim()} dimensions")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if letter in sizes and size not in sizes[letter]:
                raise UnlikeError(f"a layer is given a tensor of the form {tuple(tensor.shape)}")
        spread = tensor.shape[0] == 1 < batch and letters[0] == "B"  # one row for all
        found.append(" ".join((".", *letters[1:]) if spread else letters))
    return masks[0], tuple(found)


def check_output(output: torch.Tensor, call: LayerCall) -> None:
    """Raise UnlikeError where a layer's code gives an output [B, T, D] that the layer did not.

    Each number may be rounded otherwise. Some are so large that their last bit is more than what a
    layer adds (massive activations, Sun et al., 2024, arXiv 2402.17762).
    """
    if not output.is_contiguous() or output.dtype != call.tensors.hidden.dtype:
        raise UnlikeError("a layer's output is of another form than its input")
    before, after = call.tensors.hidden.float(), call.output.float()
    rounding = torch.finfo(output.dtype).eps * after.abs()
    added = (after - before).norm()
    error = ((output.float() - after).abs() - rounding).relu().norm()
    if not error <= TOLERATED * added:
        share = float(error / added)
        raise UnlikeError(f"a layer's output differs by {share:.0%} of what it adds")
