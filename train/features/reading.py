"""Reads the frozen target's features for packed rows.

Packing changes no feature: attention stays inside a segment, where positions start from 0.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from drafthead.heads.base import HeadBatch
from drafthead.heads.errors import UserError
from drafthead.heads.layers.tiled_attention import TiledAttention
from drafthead.heads.target.features import NO_FEATURES, Features, FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.train.data.packing import PackedData, TokenBatch
from drafthead.train.features.kept import KeptFeatures, of_row, padded


@dataclass(frozen=True)
class TargetConfig:
    """The target model. Type `auto` is the stored one, and float32 without bf16 training."""

    name: str
    dtype: str = "auto"
    trust_code: bool = False


def load_target(
    config: TargetConfig, mixed_precision: str, max_length: int, device: torch.device
) -> Target:
    """Load the target and check that it can run rows of `max_length` tokens.

    Raises UserError when it cannot be loaded or its context is shorter than a row.
    """
    in_float32 = config.dtype == "auto" and mixed_precision == "no"
    dtype = "float32" if in_float32 else config.dtype
    target = Target.from_pretrained(config.name, dtype, str(device), config.trust_code)
    check_row_length(target, config.name, max_length)
    return target


def check_row_length(target: Target, name: str, max_length: int) -> None:
    """Raise UserError when rows of `max_length` tokens are longer than the target's context."""
    if target.max_length is not None and max_length > target.max_length:
        raise UserError(
            f"data.max_length is {max_length}, but {name} has {target.max_length} positions"
        )


def computing_in(mixed_precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The one rule of number types: with `bf16`, products are computed in bfloat16.

    It holds whatever types weights and inputs have. DDP leaves both in float32, DeepSpeed casts the
    head's weights and FSDP its inputs as well; none of them casts what the target has stored.
    """
    if mixed_precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def positions_in_segments(segments: torch.Tensor) -> torch.Tensor:
    """Position ids [B, T] that start from 0 in each segment; `segments` is [B, T].

    Segments 1 1 1 2 2 0 have the positions 0 1 2 0 1 0.
    """
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - places.where(starts, 0).cummax(dim=1).values


def segment_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal mask [B, 1, T, T] inside each segment [B, T]: 0 to attend, else the lowest number."""
    # Padding counts as one more segment, so that no row of the mask is empty.
    same = segments[:, :, None] == segments[:, None, :]
    allowed = same.tril()[:, None]
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@torch.no_grad()
def read_features(
    target: Target, tokens: TokenBatch, spec: FeatureSpec, mixed_precision: str
) -> HeadBatch:
    """Run the target over packed rows [B, T] and return what the head reads, if it is anything."""
    tokens = tokens.to(target.device)
    if spec == NO_FEATURES:
        features = Features(last=None)
        return HeadBatch(tokens.input_ids, tokens.segments, tokens.supervised, features)
    # A 16-bit target runs as in decoding; autocast is only for a float32 target.
    casts = mixed_precision == "bf16" and target.dtype == torch.float32
    with TiledAttention(), computing_in(mixed_precision if casts else "no", target.device):
        features = target.read(
            tokens.input_ids,
            positions_in_segments(tokens.segments),
            segment_mask(tokens.segments, torch.bfloat16 if casts else target.dtype),
            spec,
        )
    return HeadBatch(tokens.input_ids, tokens.segments, tokens.supervised, features)


@dataclass(frozen=True)
class FeatureReader:
    """The batches of one data set, with the features of a target."""

    target: Target
    data: PackedData
    spec: FeatureSpec
    mixed_precision: str
    kept: KeptFeatures | None = None  # where features are looked up before the target runs

    def batch(self, rows: Sequence[int]) -> HeadBatch:
        """The given rows [B, T] of the data set."""
        tokens = self.data.batch(rows)
        if self.kept is None:
            return read_features(self.target, tokens, self.spec, self.mixed_precision)
        # What is kept is computed apart from what is not, in each epoch: else a run that goes on
        # would round some rows in other batches than the run that was stopped.
        kept = [row for row in rows if row < self.kept.rows]
        others = [row for row in rows if row >= self.kept.rows]
        found = dict(zip(kept, self._kept(self.kept, kept), strict=True))
        found |= dict(zip(others, self._computed(others), strict=True))
        device = self.target.device
        features = padded([found[row].map(lambda x: x.to(device)) for row in rows])
        tokens = tokens.to(device)
        return HeadBatch(tokens.input_ids, tokens.segments, tokens.supervised, features)

    def _kept(self, kept: KeptFeatures, rows: Sequence[int]) -> list[Features]:
        """The features [T, D] of each row as they are kept; computed if one is missing."""
        read = [kept.read(row) for row in rows]
        found = [features for features in read if features is not None]
        if len(found) == len(rows):
            return found
        pairs = zip(rows, self._computed(rows), strict=True)
        return [kept.write(row, features) for row, features in pairs]

    def _computed(self, rows: Sequence[int]) -> list[Features]:
        """The features [T, D] of each row, of one pass of the target over all."""
        if not rows:
            return []
        tokens = self.data.batch(rows)
        batch = read_features(self.target, tokens, self.spec, self.mixed_precision).features
        return [of_row(batch, i, self.data.row_length(row)) for i, row in enumerate(rows)]
