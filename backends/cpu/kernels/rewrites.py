"""Changes to a draft's graph, before its weights are packed: less to compute in fewer calls."""

import operator
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

# All kernels: imported, they are known to torch.
from drafthead.backends.cpu.kernels import (  # noqa: F401
    after_pass,
    attention,
    linear,
    packing,
)
from drafthead.backends.cpu.kernels.kernel_set import kernel_set

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.drafthead
# torch's code generator takes sines and cosines for cheap and computes them wherever they are read:
# those of rotary positions once for each head of each layer.
STORED = aten.cos.default, aten.sin.default


class Rewrites(CustomGraphPass):
    """Products of one input become one product, and gated MLPs one function; rotary positions are
    computed once.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change the graph of a draft."""
        join_products(graph)
        gated_halves.apply(graph)
        store_rotations(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Compiled code of other kernels is not to be taken from torch's cache: of another version,
        or for another processor that reads the same folder.
        """
        folder = Path(__file__).parent
        files = *folder.glob("*.py"), *folder.glob("source/**/*.h")
        return get_hash_for_files(tuple(sorted(map(str, files))), extra=str(kernel_set()))


def join_products(graph: torch.fx.Graph) -> None:
    """Make one product of those of one input, such as queries, keys and values."""
    alike = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=ours.linear.default):
        alike[node.args[0], node.args[3] is None, is_in_bytes(node)].append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            join(graph, nodes)


def join(graph: torch.fx.Graph, nodes: list[torch.fx.Node]) -> None:
    """Replace several products by one and its parts."""
    x, biases = nodes[0].args[0], [node.args[3] for node in nodes]
    sizes: list[int] = [node.args[2] for node in nodes]  # type: ignore[misc]
    weights = [weight for node in nodes for weight in node.args[1].args[0]]  # type: ignore
    with graph.inserting_before(nodes[0]):
        packed = graph.call_function(ours.pack.default, (weights, False, is_in_bytes(nodes[0])))
        bias = None
        if biases[0] is not None:
            bias = graph.call_function(aten.cat.default, (biases,))
        arguments = (x, packed, sum(sizes), bias)
        whole = graph.call_function(ours.linear.default, arguments)
        parts = graph.call_function(aten.split_with_sizes.default, (whole, sizes, -1))
        for index, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (parts, index))
            node.replace_all_uses_with(part)
            part.meta.update(node.meta)
    packs: list[torch.fx.Node] = [node.args[1] for node in nodes]  # type: ignore[misc]
    for node in nodes:
        graph.erase_node(node)
    for pack in dict.fromkeys(packs):
        if not pack.users:  # weights would be packed and stored all the same
            graph.erase_node(pack)


def is_in_bytes(product: Any) -> bool:
    """Whether the weights of a product are packed in bytes."""
    weights = product.args[1]
    return len(weights.args) > 2 and weights.args[2]  # torch leaves out what is the default


def silu_times(gate: Any, up: Any) -> CallFunction:
    """silu(gate) * up in bfloat16, in the operations that torch splits it into."""
    convert = prims.convert_element_type.default
    x = CallFunction(convert, gate, torch.float32, _users=2)
    exp = CallFunction(aten.exp.default, CallFunction(aten.neg.default, x))
    silu = CallFunction(aten.div.Tensor, x, CallFunction(aten.add.Tensor, exp, 1))
    return CallFunction(aten.mul.Tensor, CallFunction(convert, silu, torch.bfloat16), up)


def are_halves(match: Match) -> bool:
    """Whether gate and up are the halves of one product, which nothing else reads."""
    gate: Any = match.kwargs["gate"]
    up: Any = match.kwargs["up"]
    if not all(part.target is operator.getitem and len(part.users) == 1 for part in (gate, up)):
        return False
    parts = gate.args[0]
    if parts is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1) or len(parts.users) != 2:
        return False
    whole = parts.args[0]
    sizes = [part.meta["val"].shape[-1] for part in (gate, up)]
    return (
        whole.target is ours.linear.default
        and whole.args[3] is None  # bias
        and len(whole.users) == 1
        and len(whole.args[1].users) == 1
        and sizes[0] == sizes[1]
        and sum(sizes) == whole.args[2]
        and sizes[0] % packing.COLUMNS == 0
    )


gated_halves = PatternMatcherPass()


@register_graph_pattern(
    silu_times(KeywordArg("gate"), KeywordArg("up")),
    extra_check=are_halves,
    pass_dict=gated_halves,
)
def use_gated(match: Match, gate: Any, up: Any) -> None:
    """Replace a product, silu and the product of its halves by `linear.gated`."""
    whole = gate.args[0].args[0]
    x, packed, size, _ = whole.args
    output = match.output_node()
    with match.graph.inserting_before(output):
        arguments = packed.args[0], True, is_in_bytes(whole)
        paired = match.graph.call_function(ours.pack.default, arguments)
        node = match.graph.call_function(ours.gated.default, (x, paired, size // 2))
    node.meta.update(output.meta)
    output.replace_all_uses_with(node)
    match.erase_nodes()


@torch.library.custom_op("drafthead::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    """The values of x [...], which the code generator stores instead of computing them again."""
    return x.clone()


@kept.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@register_lowering(ours.kept.default, type_promotion_kind=None)
def _lower(x: Any) -> Any:
    x.realize()
    return x


def store_rotations(graph: torch.fx.Graph) -> None:
    """Compute sines and cosines once."""
    for target in STORED:
        for node in graph.find_nodes(op="call_function", target=target):
            with graph.inserting_after(node):
                stored = graph.call_function(ours.kept.default, (node,))
            stored.meta.update(node.meta)
            node.replace_all_uses_with(stored, delete_user_cb=lambda user, own=stored: user != own)
