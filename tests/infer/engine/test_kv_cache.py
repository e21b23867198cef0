"""The tree cache, on keys that are their own column numbers."""

import pytest
import torch

from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.kv_cache.column_cache import FRESH
from drafthead.core.target.tree_cache import StepCache, TreeCache


def keys_of(columns: list[list[float]]) -> torch.Tensor:
    """Keys [B, 1, T, 1] that hold the given numbers."""
    return torch.tensor(columns)[:, None, :, None]


def filled_cache(layers: int = 2) -> TreeCache:
    """Two rows that have committed 3 and 2 of 3 prompt columns."""
    cache = TreeCache()
    prompt = keys_of([[0.0, 1, 2], [10, 11, 99]])
    for layer in range(layers):
        cache.update(prompt + 100 * layer, -prompt, layer)
    cache.commit_prompt(torch.tensor([3, 2]), longest=3, room=8)
    return cache


def test_commit_moves_each_rows_path_behind_its_own_positions() -> None:
    cache = filled_cache()
    nodes = keys_of([[3.0, 4, 5, 6], [13, 14, 15, 16]])
    for layer in range(2):
        seen, _ = cache.update(nodes + 100 * layer, -nodes, layer)
        assert seen.shape[2] == 3 + 4
    # Row 0 keeps nodes 0 and 2, row 1 keeps nodes 0, 1 and 3.
    cache.commit(torch.tensor([[0, 2, 0], [0, 1, 3]]), torch.tensor([5, 5]), longest=5)
    assert cache.keys[0][0, 0, :5, 0].tolist() == [0, 1, 2, 3, 5]
    assert cache.keys[0][1, 0, :5, 0].tolist() == [10, 11, 13, 14, 16]
    assert cache.keys[1][1, 0, :5, 0].tolist() == [110, 111, 113, 114, 116]
    assert cache.values[0][0, 0, :5, 0].tolist() == [0, -1, -2, -3, -5]
    assert cache.lengths.tolist() == [5, 5]


def test_rows_of_several_caches_are_collected_in_their_places() -> None:
    first, second, cache = filled_cache(), filled_cache(), TreeCache()
    single = first.part([1])
    cache.collect([single, second], [[1], [2, 0]], room=4)
    assert cache.lengths.tolist() == [2, 2, 3] and cache.longest == 3
    assert cache.keys[1][0, 0, :2, 0].tolist() == [110, 111]  # the second row of `second`
    assert cache.keys[1][1, 0, :2, 0].tolist() == [110, 111]
    assert cache.keys[0][2, 0, :3, 0].tolist() == [0, 1, 2]
    assert cache.values[0][2, 0, :3, 0].tolist() == [0, -1, -2]
    assert cache.keys[0].shape[2] >= 3 + 4


@pytest.mark.parametrize("nodes", [1, 123, 124, 125, 300])
def test_the_columns_that_a_pass_sees_are_never_all_there_are(nodes) -> None:
    cache = filled_cache()
    room = cache.room(nodes)
    assert len(room.seen) == 3 + nodes < cache.keys[0].shape[2]
    assert room.columns.tolist() == list(range(3, 3 + nodes))


def test_mask_hides_the_gap_between_a_rows_positions_and_its_nodes() -> None:
    visible = torch.tensor([[[True, False], [True, True]]])
    mask = filled_cache().additive_mask(visible, torch.float32)
    assert (mask == 0).int()[:, 0].tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
    ]


def test_nodes_can_be_written_in_several_passes_and_discarded() -> None:
    cache = filled_cache(layers=1)
    cache.update(keys_of([[3.0], [13]]), keys_of([[3.0], [13]]), 0)
    cache.keep_pending(1)
    seen, _ = cache.update(keys_of([[4.0], [14]]), keys_of([[4.0], [14]]), 0)
    assert seen[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    cache.discard()
    assert cache.get_seq_length() == 3


def test_growing_keeps_what_was_committed() -> None:
    cache = filled_cache(layers=1)
    before = cache.keys[0].shape[2]
    cache.mask(torch.ones(1, before, before, dtype=torch.bool))
    assert cache.keys[0].shape[2] > before
    assert cache.keys[0][0, 0, :3, 0].tolist() == [0, 1, 2]


def test_masks_of_recorded_passes_have_one_of_few_widths_and_hide_what_follows_the_nodes() -> None:
    cache = filled_cache(layers=1)
    cache.memory = CacheMemory()
    mask = cache.mask(torch.ones(1, 2, 2, dtype=torch.bool))
    assert mask[0, 0].int().tolist() == [[1] * 5 + [0] * 123] * 2
    seen, _ = cache.update(keys_of([[3.0, 4], [13, 14]]), keys_of([[3.0, 4], [13, 14]]), 0)
    assert seen.shape[2] == mask.shape[3]


@pytest.mark.parametrize(
    ("total", "capacity"),
    [(0, 512), (64 * 16 * 2**10, 1024), (64 * 16 * 2**11 - 1, 1024), (2**40, 4096)],
)
def test_where_memory_allows_it_texts_of_all_lengths_begin_with_one_capacity(
    total: int, capacity: int
) -> None:
    """Of two rows of 8 bytes a column; a text of another capacity records its passes again."""
    for room in (1, 400):
        cache, states = TreeCache(CacheMemory(total)), torch.zeros(2, 1, 3, 1)
        cache.update(states, states, 0)
        cache.commit_prompt(torch.tensor([3, 2]), 3, room)
        assert cache.keys[0].shape[2] == capacity


@pytest.mark.parametrize("memory", [FRESH, CacheMemory(2**40)], ids=["eager", "recorded"])
def test_a_trimmed_cache_takes_what_it_needs_and_gets_the_columns_of_others_back(memory) -> None:
    cache = TreeCache(memory)
    prompt = keys_of([[0.0, 1, 2]])
    cache.update(prompt, -prompt, 0)
    cache.commit_prompt(torch.tensor([3]), 3, room=600)
    usual = cache.keys[0].shape[2]
    cache.trim()
    assert cache.keys[0].shape[2] == cache.values[0].shape[2] == 128 < usual
    cache.untrim()
    assert cache.keys[0].shape[2] == (128 if memory is FRESH else usual)
    assert cache.keys[0][0, 0, :5, 0].tolist() == [0, 1, 2, 0, 0]
    assert cache.values[0][0, 0, :3, 0].tolist() == [0, -1, -2]


def test_a_step_cache_writes_at_the_given_columns() -> None:
    keys, values = torch.zeros(1, 1, 6, 1), torch.zeros(1, 1, 6, 1)
    step = StepCache([keys], [values], torch.tensor([2, 3]), end=4)
    seen, _ = step.update(keys_of([[7.0, 8]]), keys_of([[7.0, 8]]), 0)
    assert seen[0, 0, :, 0].tolist() == [0, 0, 7, 8]
    assert keys[0, 0, :, 0].tolist() == [0, 0, 7, 8, 0, 0]


def test_rows_can_be_dropped() -> None:
    cache = filled_cache(layers=1)
    cache.keep_rows(torch.tensor([1]), longest=2)
    assert cache.lengths.tolist() == [2]
    assert cache.keys[0][0, 0, :2, 0].tolist() == [10, 11]


def test_a_row_goes_on_as_a_copy_of_another_with_the_nodes_of_the_pass() -> None:
    cache = filled_cache(layers=1)
    cache.update(keys_of([[3.0, 4], [13, 14]]), keys_of([[0.0, 0], [0, 0]]), 0)
    cache.repeat_rows([0, 0], first=1, num_nodes=2)
    assert cache.keys[0][0, 0, :5, 0].tolist() == [0, 1, 2, 3, 4]
    assert cache.keys[0][1, 0, :5, 0].tolist() == [10, 1, 2, 3, 4], "the first columns are shared"
    assert cache.lengths.tolist() == [3, 3]
    cache.repeat_rows([1, 0], first=0, num_nodes=2)  # both from what they were
    assert cache.keys[0][:, 0, 0, 0].tolist() == [10, 0]


def test_layers_may_differ_in_shape() -> None:
    cache = TreeCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 6), 1)
    cache.commit_prompt(torch.tensor([3]), 3, room=4)
    assert cache.update(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 6), 1)[0].shape == (1, 1, 4, 8)
