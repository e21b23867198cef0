"""A target whose passes all read the same number of tokens, so that all are rounded alike.

torch multiplies 1, 16 and 64 rows by other code, which sums in other orders; for one number of rows
a row's sums are the same whatever the other rows are. So each pass reads `WIDTH` tokens, padding
among them, of one row: a larger tree or a prompt is read part after part, rows one by one.

Attention still meets the keys of a node's path in other columns than plain decoding does. It is
computed in float64 and rounded to 16 bits in the end: another order changes a sum by 2^-50 of it,
which turns a rounding in one of about 2^40 numbers.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import Cache

from drafthead.core.errors import UserError
from drafthead.core.substitution import Substituting, Substitution
from drafthead.core.target.features import NO_FEATURES, Features, FeatureSpec, concatenated
from drafthead.core.target.masks import LayerMasks
from drafthead.core.target.target import Target, TargetOutput
from drafthead.core.target.tree_cache import StepCache, TreeCache

WIDTH = 16  # tokens of every pass: the rows that bfloat16 instructions work on at once
TRIED = 6  # tokens that are read at once and one by one, to see that both give the same bits

Found = TypeVar("Found")


def attention(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, H or a divisor, S, D]
    value: torch.Tensor,  # as key
    attn_mask: torch.Tensor,  # [B, 1 or H, T, S] added to the scores
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's `scaled_dot_product_attention` in float64, rounded once: [B, H, T, D]."""
    batch, heads, tokens, size = query.shape
    share = heads // key.shape[1]  # queries of one head of keys
    grouped = query.double().reshape(batch, key.shape[1], share * tokens, size)
    scores = (grouped @ key.double().mT) * (size**-0.5 if scale is None else scale)
    masked = scores.view(batch, heads, tokens, -1) + attn_mask.double()
    weights = masked.softmax(-1).view_as(scores)
    return (weights @ value.double()).view(batch, heads, tokens, -1).to(query.dtype)


def has_mask(*_: object, attn_mask: torch.Tensor | None = None, **__: object) -> bool:
    """Whether a call of attention comes with a mask, as all do that follow a cache."""
    return attn_mask is not None


IN_FLOAT64 = Substitution(scaled_dot_product_attention, attention, has_mask)


class OneWidthTarget(Target):
    """A target that reads `WIDTH` tokens of one row in every pass; see the module."""

    def __init__(self, target: Target):
        """Share the target's model.

        Raises UserError for a target whose passes would not have the same bits all the same.
        """
        if reason := obstacle(target):
            raise UserError(f"same_bits is not available here: {reason}")
        super().__init__(target.model, target.tokenizer)
        if not is_alike(self):
            raise UserError(
                f"same_bits is not available here: {type(self.model).__name__} rounds a token "
                "differently beside others (experts or scales of all tokens): leave it out"
            )

    @property
    def same_bits(self) -> bool:
        return True

    @property
    def reads_rows_alone(self) -> bool:
        return True

    @torch.no_grad()
    def run(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: LayerMasks,  # [B, 1, T, S]
        features: FeatureSpec,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        run = super().run
        if not isinstance(cache, TreeCache) or not isinstance(attention_mask, torch.Tensor):
            return run(input_ids, position_ids, attention_mask, features, cache, logits_to_keep)
        inputs = input_ids, position_ids, attention_mask
        parts = self._passes(
            *inputs, cache, lambda ids, places, mask, seen: run(ids, places, mask, features, seen)
        )
        logits = joined([[part.logits for part in row] for row in parts], input_ids.shape[1])
        found = [[part.features for part in row] for row in parts]
        return TargetOutput(logits[:, -logits_to_keep:], joined_features(found, logits.shape[1]))

    @torch.no_grad()
    def read(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor | None,  # [B, 1, T, S]
        features: FeatureSpec,
        cache: Cache | None = None,
    ) -> Features:
        read = super().read
        if not isinstance(cache, TreeCache) or attention_mask is None:
            return read(input_ids, position_ids, attention_mask, features, cache)
        inputs = input_ids, position_ids, attention_mask
        parts = self._passes(
            *inputs, cache, lambda ids, places, mask, seen: read(ids, places, mask, features, seen)
        )
        return joined_features(parts, input_ids.shape[1])

    @torch.no_grad()
    def next_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = [
            self.project(pad(part, (0, 0, 0, WIDTH - len(part)))[None])[0, : len(part)]
            for part in hidden.split(WIDTH)
        ]
        return torch.cat(parts)

    def _passes(
        self,
        ids: torch.Tensor,  # [B, T]
        positions: torch.Tensor,  # [B, T]
        mask: torch.Tensor,  # [B, 1, T, S], of whose columns the last T are those of the tokens
        cache: TreeCache,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepCache], Found],
    ) -> list[list[Found]]:
        """What `run` finds in each part of each row, `WIDTH` tokens a part; padding comes last.

        A token sees none that follow it, so parts can be read one after the other.
        """
        count = ids.shape[1]
        padding = -count % WIDTH
        columns = cache.room(count + padding).columns
        ids, positions = pad(ids, (0, padding)), pad(positions, (0, padding))
        hidden = torch.finfo(mask.dtype).min
        mask = pad(mask, (0, padding, 0, padding), value=hidden)
        first = mask.shape[-1] - count - padding
        found: list[list[Found]] = []
        for row in range(len(ids)):
            keys, values = ([s[row : row + 1] for s in of] for of in (cache.keys, cache.values))
            found.append([])
            for start in range(0, count, WIDTH):
                part, end = slice(start, start + WIDTH), first + start + WIDTH
                seen = StepCache(keys, values, columns[part], end)
                given = ids[row : row + 1, part], positions[row : row + 1, part]
                with Substituting([IN_FLOAT64]):
                    found[-1].append(run(*given, mask[row : row + 1, :, part, :end], seen))
        return found


@torch.no_grad()
def is_alike(target: Target) -> bool:
    """Whether some tokens have the same logits, bit by bit, when read at once and singly."""
    ids, logits = torch.arange(TRIED, device=target.device)[None] + target.vocab_size // 3, []
    for width in (TRIED, 1):
        cache = TreeCache()
        target.begin(cache, TRIED)
        for start in range(0, TRIED, width):
            places = torch.arange(start, start + width, device=target.device)
            mask = target.later_mask(cache, places)
            part = ids[:, start : start + width] % target.vocab_size
            logits.append(target.run(part, places[None], mask, NO_FEATURES, cache).logits)
            cache.commit(None, places[-1:] + 1, start + width)
    return torch.equal(logits[0], torch.cat(logits[1:], dim=1))


def obstacle(target: Target) -> str | None:
    """Why passes of one width would not do for a target; None where nothing is known."""
    if target.has_encoder:
        return "an encoder reads a text as a whole"
    if target.dtype.itemsize != 2:
        return "in float32 rounding is far below the distance of two logits: leave it out"
    if target.keeps_more is not None:
        return target.keeps_more
    if target.backend.compiles:
        return "its passes are compiled or recorded: leave compile out"
    if target.has_alibi or target.config._attn_implementation != "sdpa":
        return "the model's attention is not torch's scaled_dot_product_attention"
    return None


def joined(parts: list[list[torch.Tensor]], count: int) -> torch.Tensor:
    """Parts [1, WIDTH, D] of each row as one tensor [B, T, D], without the padding."""
    return torch.cat([torch.cat(row, dim=1)[:, :count] for row in parts])


def joined_features(parts: list[list[Features]], count: int) -> Features:
    """The features [1, WIDTH, D] of each row's parts as [B, T, D]."""
    rows = [concatenated(row, dim=1) for row in parts]
    return concatenated(rows, dim=0).map(lambda hidden: hidden[:, :count])
