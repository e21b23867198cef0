"""The few largest of many numbers.

torch sorts a good part of a row to find its eight best of thousands, and prepares for longer than
it sorts. Here a row is compared with the last of its best so far, eight or sixteen numbers at a
time, and hardly any is larger.
"""

import torch
from torch._inductor.lowering import register_lowering

from drafthead.backends.cpu.kernels.template import Node, call_by_rows

MOST = 64  # for more, sorting is faster
CALL = """
    top<{{most}}>({{start(x)}}, {{size(x, 0)}}, {{size(x, 1)}}, {{start(output)}},
                  {{size(output, 1)}}, {{threads}});
"""


@torch.library.custom_op("drafthead::top", mutates_args=())
def top(x: torch.Tensor, count: int) -> torch.Tensor:
    """Places [..., k] of the k largest of x [..., V] float32, from the largest on, k <= `MOST`.

    Of equals the first comes first: of 1 3 3 2 the places of the two largest are 1 and 2.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count].clone()


@top.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    torch._check(count <= x.shape[-1])
    return x.new_empty(*x.shape[:-1], count, dtype=torch.int64)


@register_lowering(torch.ops.drafthead.top.default, type_promotion_kind=None)
def _lower(x: Node, count: int) -> Node:
    """The operation in the code generator's graph."""
    return call_by_rows("top_k", CALL, {"x": x}, [count], torch.int64, {"most": MOST})
