"""A target whose passes all read the same number of tokens, so that all are rounded alike.

torch multiplies 1, 16 and 64 rows by other code, which sums in other orders; for one number of rows
a row's sums are the same whatever the other rows are. So each pass reads `WIDTH` tokens, padding
among them, of one row: a larger tree or a prompt is read part after part, rows one by one.

Attention still meets the keys of a node's path in other columns than plain decoding does. It is
computed in float64 and rounded to 16 bits in the end: another order changes a sum by 2^-50 of it,
which turns a rounding in one of about 2^40 numbers.
"""

from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from drafthead.core.errors import UserError
from drafthead.core.substitution import Substituting, Substitution
from drafthead.core.target.features import NO_FEATURES, Features, concatenated
from drafthead.core.target.target import PassInputs, Target
from drafthead.core.target.tree_cache import StepCache, TreeCache

WIDTH = 16  # tokens of every pass: the rows that bfloat16 instructions work on at once
PARTS = 1, 1, 5, 8, 19  # in which tokens are read that are also read at once, to compare their bits


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
    """Whether a call of attention comes with a mask [...], as all do that follow a cache."""
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

    def passed(self, given: PassInputs) -> tuple[torch.Tensor | None, Features]:
        """Logits [B, T, V] and features [B, T, D] of passes over `WIDTH` tokens of one row each."""
        if not isinstance(given.cache, TreeCache) or not isinstance(given.mask, torch.Tensor):
            return super().passed(given)
        rows, count = self._parts(given, given.mask, given.cache), given.ids.shape[1]
        return (
            torch.cat([torch.cat([logits for logits, _ in row], dim=1)[:, :count] for row in rows]),
            joined_features([[features for _, features in row] for row in rows], count),
        )

    @torch.no_grad()
    def next_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [B, D] -> [B, V]
        parts = [
            self.project(pad(part, (0, 0, 0, WIDTH - len(part)))[None])[0, : len(part)]
            for part in hidden.split(WIDTH)
        ]
        return torch.cat(parts)

    def _parts(
        self,
        given: PassInputs,
        mask: torch.Tensor,  # [B, 1, T, S], of whose columns the last T are those of the tokens
        cache: TreeCache,
    ) -> list[list[tuple[Any, Features]]]:
        """Logits and features of all parts of each row, `WIDTH` tokens each; padding comes last.

        A token sees none that follow it, so parts can be read one after the other.
        """
        count = given.ids.shape[1]
        padding = -count % WIDTH
        columns = cache.room(count + padding).columns
        ids, positions = (pad(each, (0, padding)) for each in (given.ids, given.positions))
        hidden = torch.finfo(mask.dtype).min
        mask = pad(mask, (0, padding, 0, padding), value=hidden)
        first = mask.shape[-1] - count - padding
        kept = None if given.logits_to_keep is None else 0
        found: list[list[tuple[Any, Features]]] = []
        for row in range(len(ids)):
            keys, values = ([s[row : row + 1] for s in of] for of in (cache.keys, cache.values))
            found.append([])
            for start in range(0, count, WIDTH):
                part, end = slice(start, start + WIDTH), first + start + WIDTH
                seen = StepCache(keys, values, columns[part], end)
                tokens, places = ids[row : row + 1, part], positions[row : row + 1, part]
                own = mask[row : row + 1, :, part, :end]
                with Substituting([IN_FLOAT64]):
                    inputs = PassInputs(tokens, places, own, given.features, seen, kept)
                    found[-1].append(super().passed(inputs))
        return found


@torch.no_grad()
def is_alike(target: Target) -> bool:
    """Whether some tokens have the same logits, bit by bit, when read at once and in parts."""
    count = sum(PARTS)
    ids, logits = torch.arange(count, device=target.device)[None] + target.vocab_size // 3, []
    for widths in ((count,), PARTS):
        cache = TreeCache()
        target.begin(cache, count)
        for start, width in zip(accumulate((0, *widths)), widths, strict=False):
            places = torch.arange(start, start + width, device=target.device)
            mask = target.later_mask(cache, places)
            part = ids[:, start : start + width] % target.vocab_size
            logits.append(target.run(part, places[None], mask, NO_FEATURES, cache).logits)
            cache.commit(None, places[-1:] + 1, start + width)
    return torch.equal(logits[0], torch.cat(logits[1:], dim=1))


def obstacle(target: Target) -> str | None:
    """The reason that passes of one width would not do for a target; None if none is known."""
    if target.has_encoder:
        return "an encoder reads a text as a whole"
    if target.dtype.itemsize != 2:
        return "in float32 rounding is far below the distance of two logits: leave it out"
    if target.keeps_more is not None:
        return target.keeps_more
    if target.backend.records:
        return "its passes are recorded: leave compile out"
    if target.has_alibi or target.config._attn_implementation != "sdpa":
        return "the model's attention is not torch's scaled_dot_product_attention"
    return None


def joined_features(parts: list[list[Features]], count: int) -> Features:
    """The features [1, WIDTH, D] of each row's parts as [B, T, D]."""
    rows = [concatenated(row, dim=1) for row in parts]
    return concatenated(rows, dim=0).map(lambda hidden: hidden[:, :count])
