"""Prompts of similar length, which are read together: padding costs as much as text.

A pass over a batch reads as many positions of each row as the longest one has. Where a processor is
busy with one prompt already, rows of other lengths are quicker in a pass of their own.
"""

from collections.abc import Sequence

import torch

from drafthead.heads.host import to_host

# What a pass costs beside its positions, in positions. SmolLM2-135M on two cores: 45 ms, then
# 0.87 ms each, in one row or in many. Elsewhere all prompts are read in one pass: a GPU is far from
# busy with one.
PASS_COST = {"cpu": 50}


def prompt_groups(lengths: Sequence[int], pass_cost: int) -> list[list[int]]:
    """The rows of each pass over prompts of these lengths, so that the passes cost least.

    Lengths 9 70 8 with a pass cost of 10 are read as rows 2 0, then 1: 2 x 9 + 70 positions and two
    passes, where one pass has 3 x 70 positions.
    """
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
    """Where each row is once the groups follow each other [B]: after 2 0 and 1, row 0 is at 1."""
    return torch.tensor([row for group in groups for row in group]).argsort()
