"""The cache of an encoder-decoder target: the source's columns, then those of the answer.

Cross-attention reads the source and self-attention reads the answer, each with its own keys and
values in every layer. Both lie in one `TreeCache`, the source first, as a prompt does without an
encoder. So rows, trees and commits are those of any target, and a row takes as many columns as it
has tokens. Two rows with sources (`s`) of 5 and 3 tokens, answers (`#`) of 2, and a tree of two
nodes (`t`)::

    s s s s s # # t t      cross-attention sees s, self-attention # and t
    s s s # # . . t t
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from drafthead.core.kv_cache.column_cache import ColumnCache, additive
from drafthead.core.target.tree_cache import TreeCache


class SourceCache(TreeCache):
    """A `TreeCache` whose rows begin with a source, which only cross-attention sees."""

    sources: torch.Tensor  # [B] their lengths
    # No source is longer or shorter than these, which the host knows; rows may have left since.
    widest, shortest = 0, 0

    def commit_sources(
        self,
        states: Sequence[tuple[torch.Tensor, torch.Tensor]],  # keys, values [B, H, W, D] of layers
        lengths: torch.Tensor,  # [B]
        bounds: tuple[int, int],  # the shortest and the longest
        room: int,
    ) -> None:
        """Begin with sources; `room` is the number of columns to allocate beside them."""
        self.sources, (self.shortest, self.widest) = lengths, bounds
        self.prompt_states = dict(enumerate(states))
        self.commit_prompt(lengths, self.widest, room)

    def for_decoder(self) -> EncoderDecoderCache:
        """This cache as a decoder takes it: what it reads of the source is there."""
        layers: list[Any] = []
        for states in zip(self.keys, self.values, strict=True):
            layers.append(layer := DynamicLayer())
            layer.keys, layer.values = (s[:, :, : self.widest] for s in states)
            layer.is_initialized = True
        return EncoderDecoderCache(self, Cache(layers=layers))

    def update(
        self,
        key_states: torch.Tensor,  # [B, H, T, D]
        value_states: torch.Tensor,  # [B, H, T, D]
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write T new positions of a layer; returns the used columns after the shortest source."""
        keys, values = super().update(key_states, value_states, layer_idx)
        return keys[:, :, self.shortest :], values[:, :, self.shortest :]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use after the shortest source."""
        return super().get_seq_length() - self.shortest

    def source_mask(self, num_nodes: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A mask of these columns, [B, 1, N, W], added to scores: N nodes see their row's source.

        None where all of them are.
        """
        if self.shortest == self.widest:
            return None
        columns = torch.arange(self.widest, device=self.sources.device)
        own = (columns < self.sources[:, None])[:, None, None]
        return additive(own, dtype).expand(-1, -1, num_nodes, -1)

    def mask(self, visible: torch.Tensor) -> torch.Tensor:
        """The mask [B, 1, N, S] of self-attention: a row does not see its source."""
        seen = super().mask(visible)
        columns = torch.arange(seen.shape[-1], device=self.sources.device)
        return seen & (columns >= self.sources[:, None])[:, None, None]

    def keep_rows(self, rows: torch.Tensor, longest: int | None = None) -> None:
        """Keep the rows [R] only, with their sources."""
        super().keep_rows(rows, longest)
        self.sources = self.sources[rows]

    def join_rows(
        self, other: ColumnCache, order: Sequence[int], longest: int | None = None
    ) -> None:
        assert isinstance(other, SourceCache)
        super().join_rows(other, order, longest)
        self.sources = torch.cat([self.sources, other.sources])[[*order]]
        self._widen([self, other])

    def collect(
        self, parts: Sequence[ColumnCache], places: Sequence[Sequence[int]], room: int
    ) -> None:
        super().collect(parts, places, room)
        begun = [part for part in parts if isinstance(part, SourceCache)]
        rows = torch.tensor([place for group in places for place in group])
        self.sources = torch.cat([part.sources for part in begun])[rows.argsort()]
        self._widen(begun)

    def _widen(self, parts: Sequence["SourceCache"]) -> None:
        self.shortest = min(part.shortest for part in parts)
        self.widest = max(part.widest for part in parts)
