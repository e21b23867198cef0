"""Attention: a query has the same bits wherever what it sees lies."""

import random
from collections.abc import Callable
from ctypes import CDLL, c_float, c_int64, c_void_p
from itertools import product

import pytest
import torch

from drafthead.backends.cpu.kernels import library
from drafthead.backends.cpu.kernels.library import text_of

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
HIDDEN = torch.finfo(torch.bfloat16).min
SIZE = 64  # of a head
SUM = """
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Unroll.h>
HEADERS
extern "C" float sum_of_weights(float* scores, const at::BFloat16* mask, int64_t columns) {
  return weigh(scores, mask, columns);
}
"""


def attention(
    query: torch.Tensor,  # [B, T, H, D]
    states: tuple[torch.Tensor, torch.Tensor],  # [B, G, C, D] each
    mask: torch.Tensor,  # [B, 1, T, S]
) -> torch.Tensor:
    """The result [B, T, H, D]."""
    keys, values = (each[:, :, : mask.shape[-1]] for each in states)
    attended = torch.ops.drafthead.attend(query.transpose(1, 2), keys, values, mask, 0.1)
    return attended.transpose(1, 2)


def random_paths(
    chance: random.Random, nodes: int, committed: int, first: int, reach: int
) -> list[list[int]]:
    """The columns that each node of a random tree sees, which lies from column `first` on."""
    paths = [[*range(committed), first]]
    for node in range(1, nodes):
        paths.append([*paths[chance.randrange(max(0, node - 4), node)], first + node])
    return [path[-reach:] for path in paths]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Numbers of very different sizes: what is left of their sum shows how it was taken."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, 12, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2**scales).bfloat16()


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_nodes_of_a_tree_in_a_batch_have_the_bits_of_their_paths_alone(first_seed) -> None:
    for seed in range(first_seed, first_seed + 20):
        chance = random.Random(seed)
        rows, groups, sharing, nodes = (chance.randint(1, most) for most in (3, 2, 3, 40))
        lengths = [chance.randrange(150) for _ in range(rows)]
        first = max(lengths) + chance.randrange(3)
        reach = chance.choice([1000, 60, 5])  # as in layers with a sliding window
        columns, capacity = first + nodes, first + nodes + chance.randrange(1, 30)
        query = numbers(seed, rows, nodes, groups * sharing, SIZE)
        keys, values = numbers(seed, 2, rows, groups, capacity, SIZE)
        keys /= 2**20
        paths = [random_paths(chance, nodes, length, first, reach) for length in lengths]
        mask = torch.full((rows, 1, nodes, columns), HIDDEN, dtype=torch.bfloat16)
        for row, node in product(range(rows), range(nodes)):
            mask[row, 0, node, paths[row][node]] = 0
        torch.set_num_threads(chance.randint(1, 2))
        found = attention(query, (keys, values), mask)
        for row, node in product(range(rows), range(nodes)):
            one, path = slice(row, row + 1), paths[row][node]
            own = keys[one, :, path].contiguous(), values[one, :, path].contiguous()
            shown = torch.zeros(1, 1, 1, len(path), dtype=torch.bfloat16)
            alone = attention(query[one, node : node + 1], own, shown)
            assert torch.equal(alone[0, 0], found[row, node]), (seed, row, node)


@pytest.fixture
def sum_of_weights(tmp_path) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """The sum of attention's weights, from scores and mask [S]; the set's own code."""
    path = tmp_path / "sum.so"
    library.compile_library(SUM.replace("HEADERS", text_of("attention_rows.h")), path)
    kernel = CDLL(str(path)).sum_of_weights
    kernel.restype = c_float

    def call(scores: torch.Tensor, mask: torch.Tensor) -> float:
        memory = torch.cat([scores, torch.zeros(16)])  # it is read in whole blocks
        pointers = c_void_p(memory.data_ptr()), c_void_p(mask.data_ptr())
        return kernel(*pointers, c_int64(len(scores)))

    return call


def test_the_sum_of_weights_has_the_same_bits_wherever_hidden_columns_lie(sum_of_weights) -> None:
    """One bit of it is seldom seen in a result that is rounded to bfloat16."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(50):
        columns = chance.randrange(1, 130)
        scores = torch.randn(columns, generator=generator)
        hidden = torch.rand(columns, generator=generator) < chance.choice([0.05, 0.5])
        hidden[chance.randrange(columns)] = False
        hidden[: chance.randrange(columns)] = False  # committed ones
        mask = torch.zeros(columns, dtype=torch.bfloat16).masked_fill(hidden, HIDDEN)
        assert sum_of_weights(scores, mask) == sum_of_weights(scores[~hidden], mask[~hidden])
