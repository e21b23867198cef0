"""Values that a graph is to compute once and keep, where the code generator would not.

It computes what is cheap anew wherever it is read, and takes sines and cosines for cheap: those of
rotary positions would be computed for each head of each layer.
"""

from typing import Any

import torch
from torch._inductor.lowering import register_lowering

PRECIOUS = torch.ops.aten.cos.default, torch.ops.aten.sin.default


@torch.library.custom_op("drafthead::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    """The same values, in memory of their own."""
    return x.clone()


@kept.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@register_lowering(torch.ops.drafthead.kept.default, type_promotion_kind=None)
def _lower(x: Any) -> Any:
    """In the code generator's graph, the values themselves, which it is told to store."""
    x.realize()
    return x


def keep_precious(graph: torch.fx.Graph) -> None:
    """Keep what is read several times and takes long to compute."""
    for target in PRECIOUS:
        for node in graph.find_nodes(op="call_function", target=target):
            with graph.inserting_after(node):
                stored = graph.call_function(torch.ops.drafthead.kept.default, (node,))
            stored.meta.update(node.meta)
            node.replace_all_uses_with(stored, delete_user_cb=lambda user, own=stored: user != own)
