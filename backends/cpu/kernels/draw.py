"""Drawing the target's own tokens along a tree.

torch writes out the probabilities, random numbers of the whole vocabulary and, for top-p, a sorted
copy, for every node of the tree. Here only the nodes on the accepted path are drawn. The largest
logits, down to where a filter can cut, are found by halving a bound; only they are sorted. The
logarithm behind a token's arrival time is computed where a bound without it does not already say
that another token comes first.
"""

import torch
from torch._inductor.lowering import register_lowering

from drafthead.backends.cpu.kernels.template import Node, call_by_rows
from drafthead.heads import sampling

CALL = """
    draw({{start(logits)}}, {{start(tokens)}}, {{start(parents)}}, {{start(keys)}},
         {{start(settings)}}, {{start(output)}}, {{size(tokens, 0)}}, {{size(tokens, 1)}},
         {{size(logits, 1)}}, {{threads}});
"""


draw = torch.library.custom_op("drafthead::draw", sampling.draw, mutates_args=())


@draw.register_fake
def _(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    keys: torch.Tensor,
    settings: torch.Tensor,
    filtered: bool,
) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


@register_lowering(torch.ops.drafthead.draw.default, type_promotion_kind=None)
def _lower(
    logits: Node, tokens: Node, parents: Node, keys: Node, settings: Node, filtered: bool
) -> Node:
    """The operation in the code generator's graph."""
    inputs = {
        "logits": logits,
        "tokens": tokens,
        "parents": parents,
        "keys": keys,
        "settings": settings,
    }
    return call_by_rows("draw", CALL, inputs, size=(), dtype=torch.int64)
