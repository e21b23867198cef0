"""The tree cache, on keys that are their own column numbers."""

import torch

from drafthead.infer.kv_cache import TreeCache


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
    cache.commit(torch.tensor([[0, 2, 0], [0, 1, 3]]), torch.tensor([2, 3]), longest=5)
    keys, values = cache.stores[0]
    assert keys[0, 0, 0, :5, 0].tolist() == [0, 1, 2, 3, 5]
    assert keys[0, 1, 0, :5, 0].tolist() == [10, 11, 13, 14, 16]
    assert keys[1, 1, 0, :5, 0].tolist() == [110, 111, 113, 114, 116]
    assert values[0, 0, 0, :5, 0].tolist() == [0, -1, -2, -3, -5]
    assert cache.lengths.tolist() == [5, 5]


def test_mask_hides_the_gap_between_a_rows_positions_and_its_nodes() -> None:
    visible = torch.tensor([[[True, False], [True, True]]])
    mask = filled_cache().mask(visible, torch.float32)
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
    before = cache.stores[0][0].shape[3]
    cache.mask(torch.ones(1, before, before, dtype=torch.bool), torch.float32)
    keys, _ = cache.stores[0]
    assert keys.shape[3] > before
    assert keys[0, 0, 0, :3, 0].tolist() == [0, 1, 2]


def test_rows_can_be_dropped() -> None:
    cache = filled_cache(layers=1)
    cache.keep_rows(torch.tensor([1]), longest=2)
    assert cache.lengths.tolist() == [2]
    assert cache.stores[0][0][0, 0, 0, :2, 0].tolist() == [10, 11]


def test_layers_of_different_shape_live_in_different_stores() -> None:
    cache = TreeCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 6), 1)
    cache.commit_prompt(torch.tensor([3]), 3, room=4)
    assert [(k.shape[-1], v.shape[-1]) for k, v in cache.stores] == [(4, 4), (8, 6)]
    assert cache.update(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 6), 1)[0].shape == (1, 1, 4, 8)
