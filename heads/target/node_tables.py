"""What a tree's nodes see as a few numbers of each, where a kernel reads no mask.

transformers hands a model's `attention_mask` to the attention function of each layer as it is, if
it has four dimensions. So a table of five numbers for each node can take the place of a mask: it is
as small for long texts as for short ones. See `heads.graphs.gpu.attention`.
"""

import torch

from drafthead.heads.target.masks import LayerKind, LayerMasks

# Nodes whose ancestors fit into the bits of one number.
MOST_NODES = 64
LENGTH, START, END, FIRST, BITS = range(5)  # columns of a table


def node_table(
    visible: torch.Tensor,  # [B or 1, N, M] bool: which of M <= 64 nodes each of N sees
    lengths: torch.Tensor,  # [B] committed positions
    start: torch.Tensor,  # [] column of the first of the M nodes
) -> torch.Tensor:
    """What N nodes see, as numbers [B, 1, N, 5] of each.

    The committed positions of its row, the columns where the tree's nodes start and end, the first
    column that it sees, and the nodes that it sees as bits: 5 is nodes 0 and 2.
    """
    places = torch.arange(visible.shape[2], device=visible.device)
    bits = (visible.long() << places).sum(-1).expand(len(lengths), -1)
    length = lengths[:, None].expand_as(bits)
    begin = start.expand_as(bits)
    numbers = [length, begin, begin + visible.shape[2], torch.zeros_like(bits), bits]
    return torch.stack(numbers, -1)[:, None]


def within_window(table: torch.Tensor, window: int) -> torch.Tensor:
    """The table [B, 1, N, 5] for layers in which a token sees the last `window` positions.

    A node's own position is the number of what it sees, less one: with 10 committed positions and
    two ancestors it is 12, and a window of 4 begins at 9. No window is smaller than a tree is deep.
    """
    bits, length = table[..., BITS], table[..., LENGTH]
    places = torch.arange(MOST_NODES, device=table.device)
    seen = ((bits[..., None] >> places) & 1).sum(-1)
    first = (length + seen - window).clamp_min(0)
    return torch.stack([length, table[..., START], table[..., END], first, bits], -1)


def is_table(mask: torch.Tensor | None) -> bool:
    """Whether a mask is one of these tables."""
    return mask is not None and mask.dtype == torch.int64


def tables_by_kind(table: torch.Tensor, kinds: tuple[LayerKind, ...]) -> LayerMasks:
    """The table [B, 1, N, 5] in the form that a model with these layers takes: see `masks_by_kind`."""
    tables = {
        kind.name: table if kind.window is None else within_window(table, kind.window)
        for kind in kinds
    }
    return tables if len(tables) > 1 else tables[kinds[0].name]


def fit_tables(kinds: tuple[LayerKind, ...]) -> bool:
    """Whether tables can say what nodes see in these layers: no ancestor of a node is hidden."""
    return all(kind.chunk is None and (kind.window or MOST_NODES) >= MOST_NODES for kind in kinds)
