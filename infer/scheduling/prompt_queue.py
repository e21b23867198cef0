"""Prompts that wait to be read, and are read in turns with the steps of others.

A prompt that is longer than one turn allows is read in parts, each of which goes on from what the
parts before it have left in the caches, as a conversation does from its earlier turns.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from time import perf_counter
from typing import TypeAlias

import torch

from drafthead.core.target.target import Target
from drafthead.infer.engine.prefill import PASS_COST, positions_of_a_pass
from drafthead.infer.scheduling.tickets import Gain, Ticket, broken_off

logger = logging.getLogger(__name__)

MOST_PADDING = 0.25
# What a turn may take, also while nobody waits for its end: somebody may come. A pass over fewer
# positions hardly pays.
TURN_SECONDS, TURN_SECONDS_ALONE = 0.25, 1.0
FEWEST_POSITIONS = 64
PASS_COST_ELSEWHERE = 512  # positions; see `PASS_COST`


# Reads prompts to their ends, or one alone to the position that is given; returns first tokens, and
# whether the prompts are read now: not where another part of them was known than it seemed.
Read: TypeAlias = Callable[[Sequence[Ticket], int | None], tuple[list[Gain], bool]]


class Prompts:
    """Reads prompts in turns: the shortest next, but each second turn is for the oldest."""

    def __init__(self, target: Target, read: Read):
        self.target, self.read = target, read
        self.unread: list[Ticket] = []  # the oldest first
        self.most = positions_of_a_pass(target.device, 1)
        self.used = 0.0  # seconds of turns, see `RunningRows`
        self.turns = 0
        self.speed = 0.0  # positions a second of the last turn; 0 before it
        self.pass_cost = PASS_COST.get(target.device.type, PASS_COST_ELSEWHERE)
        self.alone = True  # whether nobody waits for the end of a turn

    @property
    def count(self) -> int:
        """Prompts that are not read to their ends."""
        return len(self.unread)

    def positions(self, first: Ticket) -> int:
        """The number of positions that a turn may read that begins with this prompt."""
        if self.target.has_encoder:  # reads a source as a whole
            return max(each.left for each in self.unread)
        speed = first.speed or self.speed
        if self.target.is_shared or not speed:  # processes that share it have clocks of their own
            return max(1, self.most // 4)
        seconds = TURN_SECONDS_ALONE if self.alone and self.count == 1 else TURN_SECONDS
        return min(self.most, max(FEWEST_POSITIONS, int(seconds * speed) - self.pass_cost))

    def cancel(self, ids: Collection[Hashable]) -> None:
        """Read these prompts no further."""
        self.unread = [each for each in self.unread if each.id not in ids]

    @torch.no_grad()
    def turn(self) -> list[Gain]:
        """Read a part of one prompt, or some similar ones to their ends; returns first tokens."""
        self.turns += 1
        oldest = self.unread[0]
        first = oldest if self.turns % 2 else min(self.unread, key=lambda each: each.left)
        most = self.positions(first)
        is_part = first.left > most
        group = [first] if is_part else group_of(first, self.unread, most)
        count = most if is_part else sum(each.left for each in group)
        began = perf_counter()
        gains = self._tried(group, first.read + most if is_part else None)
        self.speed = (count + self.pass_cost) / max(perf_counter() - began, 1e-6)
        first.speed = self.speed
        return gains

    def _tried(self, group: Sequence[Ticket], end: int | None) -> list[Gain]:
        """Read prompts; what fails ends one answer, so the others of its group are tried alone."""
        try:
            gains, is_read = self.read(group, end)
        except Exception as error:
            if len(group) > 1:
                return [gain for each in group for gain in self._tried([each], end)]
            logger.exception("a prompt cannot be read")
            gains, is_read = broken_off(group[:1], error), True
        if is_read:
            self.unread = [each for each in self.unread if each not in group]
        return gains

    def given_up(self, error: Exception) -> list[Gain]:
        """The ends of all answers whose prompts wait."""
        unread, self.unread = self.unread, []
        return broken_off(unread, error)


def group_of(first: Ticket, unread: Sequence[Ticket], most: int) -> list[Ticket]:
    """`first` and those that one pass reads with it: similar ones, up to `most` positions in all.

    Padding is at most `MOST_PADDING` of what the others are: with a prompt of 90 tokens one of 80
    is read, and none of 40.
    """
    alike = [
        each
        for each in unread
        if each is not first and each.key == first.key and not (each.past or first.past)
    ]
    group, read, longest = [first], first.left, first.left
    for each in sorted(alike, key=lambda each: abs(each.left - first.left)):
        padded = (len(group) + 1) * max(longest, each.left)
        read += each.left
        if read > most or padded > (1 + MOST_PADDING) * read:
            break
        group.append(each)
        longest = max(longest, each.left)
    return group
