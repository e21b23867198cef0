"""Attention in tiles equals attention under the whole mask, forwards and backwards."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from drafthead.heads.layers import tiled_attention
from drafthead.heads.layers.tiled_attention import TiledAttention, tiles_of

CPU = torch.device("cpu")
EXAMPLE = torch.tensor(
    [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 1]]
).bool()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_attention, "TILE", 2)
    monkeypatch.setattr(tiled_attention, "FEWEST_SCORES", 1)


def added(mask: torch.Tensor, hidden: float) -> torch.Tensor:
    """What is added to scores under a bool mask, with small numbers where keys are seen."""
    return torch.rand(mask.shape).masked_fill(~mask, hidden)


def inputs(mask: torch.Tensor, key_heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values for a mask [B, 1, T, S]."""
    rows, _, length, columns = mask.shape
    shapes = [(rows, 4, length, 8), *[(rows, key_heads, columns, 8)] * 2]
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def gradients(mixed: torch.Tensor, sources: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((mixed * torch.linspace(0, 1, mixed.numel())
                                .view_as(mixed)).sum(), sources)  # fmt: skip


def test_a_tile_reads_the_keys_that_its_queries_see(small_tiles: None) -> None:
    first, second = tiles_of(EXAMPLE[None, None])
    assert (first.queries, first.columns) == (slice(0, 2), slice(0, 2))
    assert second.columns.tolist() == [2, 3, 5]
    assert second.mask[0, 0].tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize("hidden", [None, float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_tiles_change_neither_attention_nor_gradients(
    small_tiles: None, hidden: float | None, key_heads: int
) -> None:
    torch.manual_seed(0)
    seen = (torch.rand(3, 1, 7, 11) < 0.3) | (torch.arange(11) == torch.arange(7)[:, None])
    mask = seen if hidden is None else added(seen, hidden)
    sources = inputs(mask, key_heads)
    options = {"attn_mask": mask, "scale": 0.2, "enable_gqa": key_heads == 2}
    whole = scaled_dot_product_attention(*sources, **options)
    with TiledAttention(CPU) as tiled:
        found = scaled_dot_product_attention(*sources, **options)
    assert [len(tiles) for _, tiles in tiled.known.values()] == [3 * 4]
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(gradients(found, sources), gradients(whole, sources))


def test_a_mask_that_is_written_into_is_read_again(small_tiles: None) -> None:
    mask = torch.ones(1, 1, 4, 4).tril().bool()
    sources = inputs(mask, 4)
    with TiledAttention(CPU):
        scaled_dot_product_attention(*sources, mask)
        mask.fill_(True)
        found = scaled_dot_product_attention(*sources, mask)
    torch.testing.assert_close(found, scaled_dot_product_attention(*sources))


def test_a_query_that_sees_nothing_leaves_the_mask_whole(small_tiles: None) -> None:
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 4, 4), lowest).masked_fill(torch.ones(4, 4).tril(-1).bool(), 0)
    sources = inputs(mask, 4)
    with TiledAttention(CPU):
        found = scaled_dot_product_attention(*sources, mask)
    torch.testing.assert_close(found, scaled_dot_product_attention(*sources, mask))


def test_small_masks_and_calls_without_one_are_left_alone() -> None:
    mask = torch.ones(2, 1, 64, 64).tril().bool()
    sources = inputs(mask, 4)
    with TiledAttention(CPU) as tiled:
        found = scaled_dot_product_attention(*sources, mask)
        causal = scaled_dot_product_attention(*sources, is_causal=True)
    assert not tiled.known
    torch.testing.assert_close(found, causal)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_of_training_on_a_gpu_is_torchs(key_heads: int) -> None:
    mask = EXAMPLE[None, None]
    sources, options = inputs(mask, key_heads), {"scale": 0.2, "enable_gqa": key_heads == 2}
    with TiledAttention(torch.device("cuda")) as copying:
        found = scaled_dot_product_attention(*sources, mask, **options)
    whole = scaled_dot_product_attention(*sources, mask, **options)
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(gradients(found, sources), gradients(whole, sources))
    (row,) = copying.rows
    assert row.condition(*sources, mask) and not row.condition(*sources)
