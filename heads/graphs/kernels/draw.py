"""Drawing a token from a row of logits, for processors with AVX512.

torch writes out the probabilities, then their sums as float64, and reads these several times. Here
a row is read twice, for its largest logit and for the mass of each block of tokens, and one block a
third time, for the token.
"""

import torch
from torch._inductor.lowering import register_lowering

from drafthead.heads import sampling
from drafthead.heads.graphs.kernels.template import Node, call_by_rows

CALL = """
    draw({{start(logits)}}, {{start(temperature)}}, {{start(uniform)}}, {{start(output)}},
         {{size(logits, 0)}}, {{size(logits, 1)}}, {{threads}});
"""


draw = torch.library.custom_op("drafthead::draw", sampling.draw, mutates_args=())


@draw.register_fake
def _(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


@register_lowering(torch.ops.drafthead.draw.default, type_promotion_kind=None)
def _lower(logits: Node, temperature: Node, uniform: Node) -> Node:
    """The operation in the code generator's graph."""
    inputs = {"logits": logits, "temperature": temperature, "uniform": uniform}
    return call_by_rows("draw", CALL, inputs, size=(), dtype=torch.int64)
