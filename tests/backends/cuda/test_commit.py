"""The kernel that moves accepted nodes, interpreted or on a GPU; see conftest.py."""

import os

import pytest
import torch
from stages import more
from transformers import LlamaConfig

from drafthead.backends.cuda.commit import CacheTable, commit
from drafthead.backends.cuda.tree_kernels import EVERYTHING, CudaTreeKernels
from drafthead.core.kv_cache.column_cache import move_columns

DEVICE = os.environ["KERNELS_ON"]
LENGTHS = torch.tensor([3, 0, 9], device=DEVICE)
NODES = 12


def random_path(
    rows: int, nodes: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes [B, N] that increase from the root on, and how many of them [B] are accepted."""
    order = torch.rand(rows, nodes - 1, generator=random).argsort(1) + 1
    kept = torch.randint(nodes, (rows, 1), generator=random)
    used = torch.arange(nodes - 1) < kept
    order = order.masked_fill(~used, nodes).sort(1).values.masked_fill(~used, 0)
    return torch.cat([torch.zeros(rows, 1, dtype=torch.long), order], 1), kept[:, 0] + 1


@pytest.mark.parametrize("seed", [0, *(more(n) for n in (1, 2))])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepted_nodes_move_next_to_committed_ones(
    seed: int, gaps: bool, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(seed)
    shapes = [(3, 2, 32, 16), (3, 1, 32, 24), (3, 2, 32, 16)]
    states = [torch.randn(*s, generator=random).to(DEVICE, dtype) for s in shapes]
    path, accepted = (t.to(DEVICE) for t in random_path(3, NODES, random))
    starts = LENGTHS.max().expand(3) if gaps else None
    expected = [layer.clone() for layer in states]
    steps = torch.arange(NODES, device=DEVICE)
    places = LENGTHS[:, None] + steps
    source = (LENGTHS if starts is None else starts)[:, None] + path
    move_columns(expected, [], torch.where(steps < accepted[:, None], source, places), places)
    commit(CacheTable(states), path, accepted, LENGTHS, starts)
    assert all(map(torch.equal, states, expected))


def test_a_row_that_accepts_nothing_stays() -> None:
    states = torch.randn(2, 1, 16, 8).to(DEVICE)
    expected = states.clone()
    path = torch.tensor([[0, 2], [0, 3]], device=DEVICE, dtype=torch.int32)
    expected[1, :, 6] = expected[1, :, 8]
    commit(CacheTable([states]), path, torch.tensor([0, 2], device=DEVICE), LENGTHS[:2] * 0 + 5)
    assert torch.equal(states, expected)


def test_memory_that_comes_back_in_another_shape_is_moved_as_it_is_now() -> None:
    kernels, memory = CudaTreeKernels(LlamaConfig(), EVERYTHING), torch.zeros(512, device=DEVICE)
    path = torch.tensor([[0, 2]], device=DEVICE)
    for shape in ((2, 2, 16, 8), (1, 2, 32, 8)):
        states, rows = memory.normal_().view(shape), shape[0]
        expected = states.clone()
        expected[:, :, 6] = expected[:, :, 7]
        five = torch.full((rows,), 5, device=DEVICE)
        kernels.commit([states], path.expand(rows, -1), five * 0 + 2, five, five[0])
        assert torch.equal(states, expected)
