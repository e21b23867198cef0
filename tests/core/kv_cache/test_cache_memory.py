"""Memory of caches: an ended one's goes to the next one of the same shape."""

import pytest
import torch

from drafthead.core.kv_cache import cache_memory
from drafthead.core.kv_cache.cache_memory import (
    MOST_UNUSED,
    CacheMemory,
    Lease,
    in_steps,
    power_of_two,
)

LIKE = torch.zeros(1)


def addresses(lease: Lease) -> list[int]:
    return [store.data_ptr() for store in lease.stores]


def test_what_an_ended_cache_leaves_is_taken_again_as_a_whole_and_zeroed() -> None:
    memory, shapes = CacheMemory(), [(2, 1, 4, 3), (2, 1, 4, 3)]
    first, second = memory.take(shapes, LIKE), memory.take(shapes, LIKE)
    first.stores[1].fill_(torch.nan)
    left, kept = addresses(first), addresses(second)
    assert not {*left} & {*kept}
    del first
    third = memory.take(shapes, LIKE)
    assert addresses(third) == left
    assert all(store.eq(0).all() for store in third.stores)
    assert memory.sets_made == 2


@pytest.mark.parametrize(
    ("shape", "like"), [((2, 1, 8, 3), LIKE), ((2, 1, 4, 3), LIKE.to(torch.float16))]
)
def test_another_shape_or_number_type_gets_memory_of_its_own(shape, like) -> None:
    memory = CacheMemory()
    memory.take([(2, 1, 4, 3)], LIKE)
    memory.take([shape], like)
    assert memory.sets_made == 2


def test_unused_memory_is_bounded_by_what_was_in_use(monkeypatch) -> None:
    monkeypatch.setattr(cache_memory, "ALWAYS_KEPT", 0)
    memory = CacheMemory()
    for columns in range(1, 50):
        memory.take([(1, 1, columns, 1)], LIKE)
    unused = sum(store.nbytes for each in memory.unused for store in each.stores)
    assert unused <= (MOST_UNUSED + 1) * memory.most_in_use
    assert memory.most_in_use == 49 * LIKE.element_size()


def test_sizes_are_few() -> None:
    assert {power_of_two(n) for n in range(1, 65)} == {1, 2, 4, 8, 16, 32, 64}
    assert in_steps(1, 128) == 128
    steps = {in_steps(n, 128) // 128 for n in range(1, 128 * 24 + 1)}
    assert steps == {1, 2, 3, 4, 6, 8, 12, 16, 24}
    assert all(n <= in_steps(n, 128) <= max(128, 1.5 * n + 128) for n in range(1, 4000))
