"""Rows of a cache come and go: seats, and how much memory stays."""

import torch

from drafthead.core.kv_cache.column_cache import BLOCK, ColumnCache


def cache_of(lengths: list[int], columns: int) -> ColumnCache:
    """One layer of random numbers."""
    cache = ColumnCache()
    cache.keys, cache.values = ([torch.randn(len(lengths), 1, columns, 2)] for _ in range(2))
    cache.lengths, cache.longest = torch.tensor(lengths), max(lengths)
    return cache


def test_a_newcomer_finds_nothing_of_the_row_whose_seat_it_takes() -> None:
    """Hidden columns take part in sums, and 0 x NaN is NaN: of a row that has failed, say."""
    cache, newcomer = cache_of([9, 9, 9], BLOCK), cache_of([3], 8)
    for states in cache.states:
        states[1] = torch.nan
    kept = [states[[0, 2], :, :9].clone() for states in cache.states]
    cache.join_rows(newcomer, [0, 3, 2], longest=9)
    for states, theirs, before in zip(cache.states, newcomer.states, kept, strict=True):
        assert states[1, :, :3].equal(theirs[0, :, :3]) and not states[1, :, 3:].any()
        assert states[[0, 2], :, :9].equal(before)
    assert cache.lengths.tolist() == [9, 3, 9]


def test_memory_shrinks_when_the_longest_row_has_left() -> None:
    cache, newcomer = cache_of([2000, 5], 2048), cache_of([3], 8)
    row = cache.keys[0][1, :, :5].clone()
    cache.join_rows(newcomer, [2, 1], longest=5)
    assert {states.shape[2] for states in cache.states} == {BLOCK}
    assert cache.keys[0][1, :, :5].equal(row)
    assert cache.keys[0][0, :, :3].equal(newcomer.keys[0][0, :, :3])
