"""The tree kernel as an attention function of transformers: it reads `heads.target.node_tables`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from drafthead.heads.target.node_tables import is_table

NAME = "drafthead_tree"  # that of the function among those of transformers


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, N, D]
    key: torch.Tensor,  # [B, G, S, D]
    value: torch.Tensor,  # [B, G, S, D]
    attention_mask: torch.Tensor | None,  # [B, 1, N, S], or a table
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [B, N, H, D] of a layer, as transformers calls it."""
    if not is_table(attention_mask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.drafthead.tree_attention(
        query, key, value, attention_mask, scale, softcap, others.get("s_aux")
    )
    return output.view(query.shape[0], query.shape[2], query.shape[1], -1), None


@torch.library.custom_op("drafthead::tree_attention", mutates_args=())
def _tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    # Triton is no part of torch for CPUs.
    from drafthead.heads.graphs.gpu.tree_attention import tree_attention

    length, start, end, first, bits = table[:, 0].unbind(-1)
    of_rows = length[:, 0], start[:, 0], end[:, 0]
    return tree_attention(
        query, keys, values, *of_rows, bits, scale=scale, first=first, softcap=softcap, sinks=sinks
    )


@_tree_attention.register_fake
def _(query, keys, values, table, scale, softcap, sinks):  # type: ignore[no-untyped-def]
    rows, heads, nodes, width = query.shape
    return query.new_empty(rows, nodes, heads * width)


AttentionInterface.register(NAME, attend)


@contextmanager
def tree_attention_used(config: PretrainedConfig) -> Iterator[None]:
    """Within, layers of a model of this text configuration attend by `attend`."""
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own
