"""The pass over the prompts, in chunks, so that long ones need little memory beside the cache."""

import torch

from drafthead.heads.cache import READ_CHUNK, additive
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.heads.target.tree_cache import StepCache, TreeCache


def prefill(
    target: Target,
    ids: torch.Tensor,  # [B, T] right-padded
    lengths: torch.Tensor,  # [B]
    features: FeatureSpec,
    cache: TreeCache,
    room: int,
    chunk: int = READ_CHUNK,
) -> tuple[Features, torch.Tensor]:
    """Read prompts into the cache; returns features [B, T, D] and last hidden states [B, D].

    What the cache holds already is the beginning of all prompts; T counts the positions after it.
    `features` are kept for all positions; the last hidden state is also returned where each row
    ends. `room` columns are allocated beside the prompts. A prompt of 5 tokens in chunks of 2 is
    read in passes over positions 0 1, 2 3 and 4.
    """
    longest, tapped = ids.shape[1], features.with_last()
    parts: list[Features] = []
    hidden: torch.Tensor | None = None
    for start in range(cache.longest, longest, chunk):
        end = min(start + chunk, longest)
        part = read_chunk(target, ids, start, end, tapped, cache, room)
        assert part.last is not None
        places = (lengths - 1 - start).clamp(0, end - start - 1)
        found = part.last[torch.arange(len(ids), device=ids.device), places]
        # A row that ends later overwrites this in a later chunk.
        hidden = found if hidden is None else torch.where(lengths[:, None] > start, found, hidden)
        parts.append(part if features.last else Features(None, part.taps))
    # From here on each row's own length counts: what follows it is padding.
    cache.commit(None, lengths, longest)
    assert hidden is not None
    return concatenated(parts), hidden


def read_chunk(
    target: Target,
    ids: torch.Tensor,  # [B, T]
    start: int,
    end: int,
    features: FeatureSpec,
    cache: TreeCache,
    room: int,
) -> Features:
    """Read positions `start` to `end` of all rows, which follow what the cache holds.

    Padding lies to the right, where a causal mask never looks, so all rows count as equally long.
    """
    rows, longest = ids.shape
    numbers = torch.arange(end, device=ids.device)
    part, positions = ids[:, start:end], numbers[start:].expand(rows, -1)
    if start == 0:  # the model builds its own mask
        found = target.read(part, positions, None, features, cache)
        read = torch.full((rows,), end, device=ids.device)
        cache.commit_prompt(read, end, longest - end + room)
        return found
    _, columns = cache.make_room(end - start)
    causal = numbers[start:, None] >= numbers  # [T, S]
    mask = additive(causal, target.dtype).expand(rows, 1, -1, -1)
    # Not the cache itself: a target would take this for a step, and compile it.
    step = StepCache(cache.keys, cache.values, columns, end)
    found = target.read(part, positions, mask, features, step)
    cache.commit(None, torch.full((rows,), end, device=ids.device), end)
    return found


def concatenated(parts: list[Features]) -> Features:
    """Features of positions that follow each other, as one."""
    if len(parts) == 1:
        return parts[0]
    last = [part.last for part in parts if part.last is not None]
    taps = zip(*(part.taps for part in parts), strict=True)
    return Features(torch.cat(last, 1) if last else None, tuple(torch.cat(tap, 1) for tap in taps))
