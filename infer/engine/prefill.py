"""The passes over prompts: rows of similar length together, in chunks that need little memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad

from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.host import to_host
from drafthead.core.kv_cache.column_cache import READ_CHUNK
from drafthead.core.target.features import Features, FeatureSpec, concatenated
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import TreeCache

# Positions of all rows that one pass over prompts reads on a GPU: most prompts are then read in a
# single pass, which needs no mask.
GPU_POSITIONS = 8192
# What a pass costs beside its positions, in positions. SmolLM2-135M on two cores: 45 ms, then
# 0.87 ms each, in one row or in many. Elsewhere all prompts are read in one pass: a GPU is far from
# busy with one.
PASS_COST = {"cpu": 50}
# Tokens of the last pass over a prompt of which running states are kept, and the fewest of any
# pass: over one alone some models (Zamba 2) step, which rounds otherwise than reading.
LAST_READ = 2


@dataclass(frozen=True)
class ReadState:
    """The state of target and drafter after the beginning of all prompts of a batch."""

    cache: TreeCache
    session: DraftSession


def prefill(
    target: Target,
    ids: torch.Tensor,  # [B, T] right-padded
    lengths: torch.Tensor,  # [B]
    features: FeatureSpec,
    cache: TreeCache,
    room: int,
    chunk: int | None = None,
) -> tuple[Features, torch.Tensor]:
    """Read prompts into the cache; returns features [B, T, D] and last hidden states [B, D].

    What the cache holds already is the beginning of all prompts; T counts the positions after it.
    `features` are kept for all positions; the last hidden state is also returned where each row
    ends. `room` columns are allocated beside the prompts. A pass reads `chunk` positions of each
    row; without it as many as the device reads at its best.
    """
    chunk = chunk or positions_of_a_pass(ids.device, len(ids))
    width = ids.shape[1] - cache.longest
    groups = rows_of_passes(lengths - cache.longest, target.reads_rows_alone)
    if len(groups) == 1:
        return read_rows(target, ids, lengths, features, cache, room, chunk)
    parts: list[TreeCache] = []
    found: list[tuple[Features, torch.Tensor]] = []
    for group in groups:
        own = lengths[group]
        prompts = ids[group, : to_host(own.max())]
        parts.append(cache.part(group))
        found.append(read_rows(target, prompts, own, features, parts[-1], 0, chunk))
    # Groups are read in the order of their lengths; rows return to where the request has them.
    cache.collect(parts, groups, room)
    back = places_of_rows(groups)
    wide = [part.map(lambda s: pad(s, (0, 0, 0, width - s.shape[1]))) for part, _ in found]
    hidden = torch.cat([hidden for _, hidden in found])
    return concatenated(wide, dim=0).map(lambda states: states[back]), hidden[back]


def prefill_drafter(
    drafter: Drafter,
    ids: torch.Tensor,  # [B, T] right-padded prompts
    lengths: torch.Tensor,  # [B]
    committed: Committed,  # of the pass over them
) -> DraftSession:
    """A session that has read the prompts, those of similar length together.

    Where one prompt has 900 tokens and fifteen have 100, padding would make them 14,400 positions,
    and groups make them 2,400.
    """
    groups = rows_of_passes(lengths, alone=False)
    if len(groups) == 1:
        session = drafter.start(ids, lengths)
        session.commit(committed)
        return session
    sessions = []
    for group in groups:
        part = committed.of_rows(group)
        assert part.width is not None
        sessions.append(drafter.start(ids[group, : part.width], lengths[group]))
        sessions[-1].commit(part)
    joined, *others = sessions
    for number, other in enumerate(others, start=1):
        joined.join_rows(other, range(sum(map(len, groups[: number + 1]))))
    joined.keep_rows(places_of_rows(groups).to(lengths.device))
    return joined


def positions_of_a_pass(device: torch.device, rows: int) -> int:
    """The number of positions of each row that one pass over prompts reads."""
    return max(READ_CHUNK, GPU_POSITIONS // rows) if device.type == "cuda" else READ_CHUNK


def read_rows(
    target: Target,
    ids: torch.Tensor,  # [B, T] right-padded
    lengths: torch.Tensor,  # [B]
    features: FeatureSpec,
    cache: TreeCache,
    room: int,
    chunk: int,
) -> tuple[Features, torch.Tensor]:
    """`prefill` of rows that are read together, `chunk` positions of each in a pass.

    A prompt of 5 tokens in chunks of 2 is read in passes over positions 0 1, 2 3 and 4.
    """
    longest, tapped = ids.shape[1], features.with_last()
    if target.has_encoder:  # which reads a source as a whole; no drafter reads its features
        return Features(None), target.read_sources(ids, lengths, cache, room)
    if not cache.keys:
        target.begin(cache, longest + room)
    parts: list[Features] = []
    hidden: torch.Tensor | None = None
    for start, end in pairwise(ends_of_passes(cache.longest, longest, chunk, target)):
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
    return concatenated(parts, dim=1), hidden


def ends_of_passes(first: int, longest: int, chunk: int, target: Target) -> list[int]:
    """The ends of passes over a prompt, from its beginning: 0 2 4 5 for 5 tokens in chunks of 2.

    A running state is kept where a pass ends. What goes on with this prompt may differ in its last
    token, whose position is read again, so one pass ends before that: 0 2 3 5.
    """
    if target.stateful_layers is None:
        return [*range(first, longest, chunk), longest]
    stop, size = longest - LAST_READ, max(LAST_READ, chunk)
    if stop < first + (LAST_READ if first else 1):
        return [first, longest]
    return [first, *range(first + size, stop - 1, size), stop, longest]


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
    places = torch.arange(start, end, device=ids.device)
    part, read = ids[:, start:end], torch.full((rows,), end, device=ids.device)
    mask = None  # the model builds its own
    if cache.keys:
        mask = target.later_mask(cache, places)
    positions = target.legal_positions(places)  # a draft model's context may be shorter
    found = target.read(part, positions.expand(rows, -1), mask, features, cache)
    if cache.keys:
        cache.commit(None, read, end)
    else:
        cache.commit_prompt(read, end, longest - end + room)
    return found


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as right-padded ids [B, T] and their lengths [B]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    return ids.to(device), torch.tensor([len(prompt) for prompt in prompts], device=device)


def prompt_groups(lengths: Sequence[int], pass_cost: int) -> list[list[int]]:
    """The rows of each pass over prompts of these lengths, so that the passes cost least.

    Lengths 9 70 8 with a pass cost of 10 are read as rows 2 0, then 1: 2 x 9 + 70 positions and two
    passes, where one pass has 3 x 70 positions.
    """
    # The best groups are runs of the sorted lengths, so that one loop over their ends finds them.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # Rows of one length are not parted: with a longer one they would cost more.
    ends = [n for n in range(1, len(order)) if lengths[order[n - 1]] < lengths[order[n]]]
    # Reading the shortest n prompts: the least cost, and how many come before the last pass.
    least = {0: (0, 0)}
    for end in [*ends, len(order)]:
        longest = lengths[order[end - 1]]
        least[end] = min(
            (cost + (end - start) * longest + pass_cost, start)
            for start, (cost, _) in least.items()
        )
    groups: list[list[int]] = []
    while order:
        start = least[len(order)][1]
        groups.append(order[start:])
        del order[start:]
    return groups[::-1]


def rows_of_passes(unread: torch.Tensor, alone: bool) -> list[list[int]]:
    """`prompt_groups` of prompts with that many unread positions [B], for the device of these.

    Where rows are read `alone`, each is a group.
    """
    rows = range(len(unread))
    if alone:
        return [[row] for row in rows]
    if len(rows) == 1 or unread.device.type not in PASS_COST:
        return [[*rows]]
    return prompt_groups(to_host(unread), PASS_COST[unread.device.type])


def places_of_rows(groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """The place [B] of each row in groups that follow each other: in 2 0 and 1, row 0 is at 1."""
    return torch.tensor([row for group in groups for row in group]).argsort()
