"""Attention under masks in training: on a CPU only what a few queries see is computed.

A mask of packed conversations, or of a head's steps from many anchors, hides most of what it
covers, and torch's kernel for CPUs computes all of it. Here neighbouring queries are a tile, whose
keys are those that any of them sees. Two tiles of two queries::

    1 . . . . .   the keys 0 and 1, next to each other
    1 1 . . . .
    . . 1 . . .   the keys 2, 3 and 5
    . . 1 1 . 1

On a GPU two things cost more than the mask. Most of torch's kernels that need not write out all
scores take no keys that query heads share, so keys are copied: the scores of 2,048 tokens and 32
heads are 512 MB of float32 for each row and step of a head. And cuDNN prepares itself for each
shape anew, while hardly two batches have one shape, so others compute.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from drafthead.core.substitution import Substituting, Substitution

TILE = 64  # queries; of 32 to 128 the quickest for rows of 768 tokens
FEWEST_SCORES = 2**16  # of a row's mask that is worth tiling
UNPREPARED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Tile:
    """Neighbouring queries of one row, and what they see."""

    row: int
    queries: slice
    columns: slice | torch.Tensor  # of the keys: a slice where they are neighbours, or places [s]
    mask: torch.Tensor  # [1, 1, n, s] of these queries and keys


def tiles_of(mask: torch.Tensor) -> list[Tile] | None:
    """The tiles of a mask [B, 1, T, S], row by row; None if some query sees nothing.

    A bool mask holds what is seen, another one what is added to the scores.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    if not seen.any(-1).all():
        return None
    rows, _, length, _ = mask.shape
    places = [(row, start) for row in range(rows) for start in range(0, length, TILE)]
    return [tile_at(mask, seen, row, slice(start, start + TILE)) for row, start in places]


def tile_at(
    mask: torch.Tensor,  # [B, 1, T, S]
    seen: torch.Tensor,  # [B, 1, T, S] bool
    row: int,
    queries: slice,
) -> Tile:
    """The tile of these queries: its keys lie between the first and the last that one sees."""
    places = seen[row, 0, queries].any(0).nonzero()[:, 0]
    first, last = int(places[0]), int(places[-1])
    neighbours = last - first + 1 == len(places)
    columns = slice(first, last + 1) if neighbours else places
    return Tile(row, queries, columns, mask[row : row + 1, :, queries, columns])


def attend(
    queries: torch.Tensor,  # [B, H, T, head_dim]
    keys: torch.Tensor,  # [B, Hkv, S, head_dim]
    values: torch.Tensor,  # [B, Hkv, S, head_dim]
    tiles: list[Tile],
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention [B, H, T, head_dim], tile by tile."""
    # By row first: the gradient of a slice is as large as what it is cut out of.
    by_row = list(zip(queries.split(1), keys.split(1), values.split(1), strict=True))
    mixed: list[list[torch.Tensor]] = [[] for _ in by_row]
    for tile in tiles:
        row_queries, row_keys, row_values = by_row[tile.row]
        mixed[tile.row].append(
            scaled_dot_product_attention(
                row_queries[:, :, tile.queries],
                columns_of(row_keys, tile.columns),
                columns_of(row_values, tile.columns),
                tile.mask,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        )
    return torch.cat([torch.cat(parts, dim=2) for parts in mixed])


def columns_of(states: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
    """Some columns [B, H, s, head_dim] of states [B, H, S, head_dim]."""
    if isinstance(columns, slice):
        return states[:, :, columns]
    return states.index_select(2, columns)


def has_mask(
    queries: torch.Tensor,  # [B, H, T, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> bool:
    """Tell whether attention is under a mask."""
    return attn_mask is not None


def attend_on_gpu(
    queries: torch.Tensor,  # [B, H, T, head_dim]
    keys: torch.Tensor,  # [B, Hkv, S, head_dim]
    values: torch.Tensor,  # as keys
    *others: Any,
    enable_gqa: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attention [B, H, T, head_dim], with the arguments of torch's function."""
    if enable_gqa:
        heads = queries.shape[1] // keys.shape[1]
        keys, values = (states.repeat_interleave(heads, dim=1) for states in (keys, values))
    with sdpa_kernel(UNPREPARED):
        return scaled_dot_product_attention(queries, keys, values, *others, **options)


class TiledAttention(Substituting):
    """A context in which attention under large masks [B, 1, T, S] on a CPU is computed in tiles,
    and on a GPU as it suits training there.

    It reaches calls of `scaled_dot_product_attention` in any model, such as a target of
    transformers. What is returned differs by rounding.
    """

    def __init__(self, device: torch.device):
        ways = {
            "cpu": (self._attend, self._can_be_tiled),
            "cuda": (attend_on_gpu, has_mask),
        }
        way = ways.get(device.type)
        operation = scaled_dot_product_attention
        super().__init__([] if way is None else [Substitution(operation, *way)])
        # By address. The masks are kept, so that no other one can come to the address of one.
        self.known: dict[tuple[object, ...], tuple[torch.Tensor, list[Tile] | None]] = {}

    def _attend(
        self,
        queries: torch.Tensor,  # [B, H, T, head_dim]
        keys: torch.Tensor,  # [B, Hkv, S, head_dim]
        values: torch.Tensor,  # [B, Hkv, S, head_dim]
        attn_mask: torch.Tensor,  # [B, 1, T, S]
        *_: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """Attention [B, H, T, head_dim], with the arguments of torch's function."""
        tiles = self._tiles(attn_mask)
        assert tiles is not None
        return attend(queries, keys, values, tiles, scale, enable_gqa)

    def _can_be_tiled(
        self,
        queries: torch.Tensor,  # [B, H, T, head_dim]
        keys: torch.Tensor,
        values: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *_: Any,
        **__: Any,
    ) -> bool:
        """Tell whether there is a mask of each row that is large enough, and nothing is random."""
        rows = queries.shape[0]
        return (
            attn_mask is not None
            and dropout_p == 0
            and attn_mask.dim() == 4
            and attn_mask.shape[:2] == (rows, 1)
            and attn_mask.numel() >= FEWEST_SCORES * rows
            and self._tiles(attn_mask) is not None
        )

    def _tiles(self, mask: torch.Tensor) -> list[Tile] | None:
        """The tiles of a mask, found once; None where some query sees nothing."""
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask._version)
        if key not in self.known:
            self.known[key] = (mask, tiles_of(mask))
        return self.known[key][1]
