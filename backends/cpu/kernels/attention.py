"""Attention of few queries over a long cache.

torch's kernel for CPUs is made for blocks of queries: for a token tree it spends most of its time
on setting up small matrix products. Here one function works through the queries that share a head
of keys sixteen at a time::

    scores[r, s]  = scale * query[r] . key[s] + mask[r, s]     16 keys at once, pairs of values
    weights[r]    = exp(scores[r] - max_s scores[r, s])        float32
    output[r]     = sum_s bfloat16(weights[r, s]) value[s] / sum_s weights[r, s]

As in torch's kernel, weights are rounded to bfloat16 before they are multiplied with the values;
with AVX2 they stay in float32, and four keys are multiplied at once.

A query's result depends on the columns that it sees and on their order, bit by bit: not on other
queries, and not on where the columns lie. Values are added one column after the other, where one of
weight 0 changes nothing, and a weight's partial sum is chosen by its place among those that are
seen. So a node of a tree gets what it gets in plain decoding.
"""

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from drafthead.backends.cpu.kernels import operations  # noqa: F401  (makes them known to torch)
from drafthead.backends.cpu.kernels.template import KernelTemplate, Node

CALL = """
{%- macro steps(x) %}Steps{ {{stride(x, 0)}}, {{stride(x, 1)}}, {{stride(x, 2)}} }{% endmacro %}
{%- set mask_row = stride(mask, 0) if mask.get_size()[0] != 1 else 0 %}
{%- set mask_head = stride(mask, 1) if mask.get_size()[1] != 1 else 0 %}
    attend<{{size(query, 3)}}>(
        {{start(query)}}, {{steps(query)}},
        {{start(key)}}, {{steps(key)}},
        {{start(value)}}, {{steps(value)}},
        {{start(mask)}}, Steps{ {{mask_row}}, {{mask_head}}, {{stride(mask, 2)}} },
        {{start(output)}}, {{steps(output)}},
        {{size(query, 0)}}, {{size(query, 1)}}, {{size(key, 1)}},
        {{size(query, 2)}}, {{size(key, 2)}}, {{scale}}, {{threads}});
"""


@register_lowering(torch.ops.drafthead.attend.default, type_promotion_kind=None)
def _lower(query: Node, key: Node, value: Node, mask: Node, scale: float) -> Node:
    """The operation in the code generator's graph."""
    batch, heads, tokens, size = query.get_size()
    strides = [tokens * heads * size, size, heads * size, 1]
    layout = ir.FixedLayout(
        query.get_device(), query.get_dtype(), [batch, heads, tokens, size], strides
    )
    inputs = {"query": ir.ExternKernel.require_contiguous(query)}
    # Keys and values are read where they are in the cache: a pass sees a part of its columns.
    for name, node in (("key", key), ("value", value), ("mask", mask)):
        inputs[name] = ir.ExternKernel.realize_input(node)
    template = KernelTemplate("attention", CALL, inputs, layout, {"scale": scale})
    return template.generate().output_node()
