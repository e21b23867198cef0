"""How the constants of a graph come from a model's weights.

Weights are frozen into a graph: joined, packed, laid out for the processor. A graph on the disk
holds none of them. It knows the operations that they come from, and repeats these on the model at
hand::

    {"call": "drafthead.pack.default", "args": [[{"weight": [0, "mlp.up_proj.weight"]}], false]}
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from drafthead.backends.fingerprint import UndescribedError
from drafthead.core.target.weight_state import weights_of

Recipe = Any  # JSON
# Sources of constants by their place in memory and their form.
Sources = dict[tuple[Any, ...], Recipe]
OPERATIONS = torch._ops.OpOverload, torch._ops.OpOverloadPacket
NAMES = torch.dtype, torch.layout, torch.memory_format


def key_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells one tensor [...] from others that are alive."""
    if tensor.layout is not torch.strided:  # one of oneDNN's, whose memory has no address
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Recipes:
    """The recipes of the constants that torch computes while it makes a graph."""

    def __init__(self, reads: Sequence[Any]):
        """`reads` are the models, tensors and other values that the graph reads."""
        self.known: Sources = {}
        self.alive: list[torch.Tensor] = []  # or another tensor could take the place of one
        for number, part in enumerate(reads):
            named = weights_of(part) if isinstance(part, nn.Module) else [("", part)]
            for name, weight in named:
                if isinstance(weight, torch.Tensor):
                    self.known.setdefault(key_of(weight), {"weight": [number, name]})

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the constants that are computed within."""
        from torch._inductor import constant_folding  # takes seconds

        replace = constant_folding.replace_node_with_constant

        def noted(graph: Any, node: torch.fx.Node, constant: Any, *rest: Any) -> None:
            if isinstance(constant, torch.Tensor) and key_of(constant) not in self.known:
                self.alive.append(constant)
                self.known[key_of(constant)] = self._of_node(node, graph)
            replace(graph, node, constant, *rest)

        with patch.object(constant_folding, "replace_node_with_constant", noted):
            yield

    def of(self, tensor: torch.Tensor) -> Recipe:
        """The recipe of a constant; raises UndescribedError where none is known."""
        if key_of(tensor) not in self.known:
            raise UndescribedError(f"a constant of the shape {tuple(tensor.shape)}")
        return self.known[key_of(tensor)]

    def _of_node(self, node: torch.fx.Node, graph: Any) -> Recipe:
        """The recipe of a node's value, which is the same at every call."""
        if node.op == "get_attr":
            tensor = reduce(getattr, str(node.target).split("."), graph)
            return self.known.get(key_of(tensor), {"unknown": str(node.target)})
        if not isinstance(node.target, OPERATIONS):
            return {"unknown": str(node.target)}
        operands = node.args, node.kwargs
        args, kwargs = (self._of_operand(operand, graph) for operand in operands)
        return {"call": str(node.target), "args": args, "kwargs": kwargs}

    def _of_operand(self, operand: Any, graph: Any) -> Recipe:
        if isinstance(operand, torch.fx.Node):
            return self._of_node(operand, graph)
        if isinstance(operand, Mapping):
            return {name: self._of_operand(part, graph) for name, part in operand.items()}
        if isinstance(operand, list | tuple):
            return [self._of_operand(part, graph) for part in operand]
        if isinstance(operand, NAMES):
            return {"torch": str(operand).removeprefix("torch.")}
        if isinstance(operand, torch.device):
            return {"device": str(operand)}
        return operand if operand is None or type(operand) in (bool, int, float) else {"unknown": 0}


def cooked(recipe: Recipe, reads: Sequence[Any]) -> Any:
    """The value of a recipe for what is at hand; raises KeyError for a recipe with a gap."""
    if isinstance(recipe, list):
        return [cooked(part, reads) for part in recipe]
    if not isinstance(recipe, dict):
        return recipe
    if "weight" in recipe:
        number, name = recipe["weight"]
        owner, _, attribute = name.rpartition(".")
        part = reads[number]
        return getattr(part.get_submodule(owner), attribute) if name else part
    if "torch" in recipe:
        return getattr(torch, recipe["torch"])
    if "device" in recipe:
        return torch.device(recipe["device"])
    kwargs = {name: cooked(part, reads) for name, part in recipe["kwargs"].items()}
    operation: Any = reduce(getattr, recipe["call"].split("."), torch.ops)
    return operation(*cooked(recipe["args"], reads), **kwargs)


def has_gap(recipe: Recipe) -> bool:
    """Whether a part of a recipe is unknown."""
    parts = recipe.values() if isinstance(recipe, dict) else recipe
    inner = isinstance(recipe, dict | list) and any(map(has_gap, parts))
    return inner or (isinstance(recipe, dict) and "unknown" in recipe)
