"""Attention of few queries: right in every layout, alike for any number of queries."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional

from drafthead.backends.cpu.kernels import library
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.lab.theory.chains import greedy_stepper, pass_alone

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
CAPACITY = 96  # columns of the cache, of which a pass sees a part
SIZES = [  # rows, heads, heads of keys, queries, columns, size of a head
    (1, 3, 3, 1, 40, 64),
    (1, 4, 2, 8, 33, 32),
    (2, 2, 1, 19, 64, 128),
    (3, 2, 2, 5, 7, 64),
    (1, 2, 2, 9, 16, 256),
    (1, 5, 5, 4, 90, 64),
    (1, 9, 3, 70, 90, 64),
    (2, 4, 1, 33, 95, 96),
]
SIGHTS = ["random", "a prompt", "a window"]  # which columns queries see


@pytest.fixture(params=[1, 2])
def threads(request) -> int:
    """One thread, and two, which share the heads that are left over."""
    torch.set_num_threads(request.param)
    return request.param


def inputs(rows, heads, key_heads, queries, columns, size, sight="random") -> list[torch.Tensor]:
    """Queries, a part of the columns of a larger cache, and a mask."""
    torch.manual_seed(0)
    query = torch.randn(rows, queries, heads, size).bfloat16().transpose(1, 2)
    keys, values = torch.randn(2, rows, key_heads, CAPACITY, size).bfloat16()[:, :, :, :columns]
    hidden = torch.rand(rows, 1, queries, columns) < 0.3
    hidden[..., 0] = False
    if sight != "random":
        behind = columns - queries + torch.arange(queries)[:, None] - torch.arange(columns)
        hidden[:] = (behind < 0) | ((behind > 20) & (sight == "a window"))
        hidden[0, :, 0] |= sight == "a window"  # all columns
    mask = torch.zeros(hidden.shape, dtype=torch.bfloat16)
    return [query, keys, values, mask.masked_fill(hidden, torch.finfo(torch.bfloat16).min)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_equals_float64_up_to_the_rounding_of_weights_and_result(sizes, sight) -> None:
    query, keys, values, mask = inputs(*sizes, sight)
    found = torch.ops.drafthead.attend(query, keys, values, mask, 0.1).double()
    exact = [tensor.double() for tensor in (query, keys, values, mask)]

    def mixed(values: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            *exact[:2], values, exact[3], scale=0.1, enable_gqa=True
        )

    expected, most = mixed(exact[2]), mixed(exact[2].abs())
    rounding = 2**-8  # of a number in bfloat16, at most
    assert ((found - expected).abs() <= rounding * (most + expected.abs()) + 1e-5).all()
    assert (found - expected).abs().mean() < 0.3 * (rounding * most).mean()


@pytest.mark.usefixtures("threads")
def test_a_query_has_the_same_bits_alone_and_among_others() -> None:
    query, keys, values, mask = inputs(1, 3, 3, 19, 90, 64)
    together = torch.ops.drafthead.attend(query, keys, values, mask, 0.1)
    for count in (1, 2, 4, 8, 11, 17):
        part = query[:, :, :count], keys, values, mask[:, :, :count]
        assert torch.equal(torch.ops.drafthead.attend(*part, 0.1), together[:, :, :count])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [32, 64, 96, 256])
@pytest.mark.parametrize("reach", [100, 40])  # a window's, of layers that have one
def test_a_query_has_the_same_bits_in_a_batch_of_prompts_and_alone(size, reach) -> None:
    """Prompts of up to 100 tokens, after other columns and around some that nobody sees."""
    torch.manual_seed(0)
    skipped = [(0, 100, 0), (3, 37, 5), (8, 64, 1)]  # columns before, then at a length so many
    tokens, columns = 100, 113
    query = torch.randn(3, tokens, 6, size).bfloat16().transpose(1, 2)
    keys, values = torch.randn(2, 3, 2, columns, size).bfloat16() * 2
    mask = torch.full((3, 1, tokens, columns), torch.finfo(torch.bfloat16).min).bfloat16()
    seen = []
    for row, (before, at, gap) in enumerate(skipped):
        order = [before + n + (gap if n >= at else 0) for n in range(tokens)]
        seen.append([order[max(0, n + 1 - reach) : n + 1] for n in range(tokens)])
        for token, its in enumerate(seen[-1]):
            mask[row, :, token, its] = 0
    together = torch.ops.drafthead.attend(query, keys, values, mask, 0.1)
    for row, token in itertools.product(
        range(3), [0, 1, 30, 31, 32, 33, 62, 63, 64, 65, 95, 96, 99]
    ):
        its, one = seen[row][token], slice(row, row + 1)
        states = keys[one, :, its].contiguous(), values[one, :, its].contiguous()
        shown = torch.zeros(1, 1, 1, len(its)).bfloat16()
        alone = torch.ops.drafthead.attend(query[one, :, token : token + 1], *states, shown, 0.1)
        assert torch.equal(alone[0, :, 0], together[row, :, token]), (row, token)


def test_bfloat16_passes_of_our_kernels_are_as_near_to_float32_as_eager_ones(make_target) -> None:
    """Passes over one token and over several, after the same text."""
    exact = make_target(hidden=128)
    rounded = Target(copy.deepcopy(exact.model).to(torch.bfloat16))
    logits = []
    for target in (exact, rounded, rounded.packed()):
        prompts, nothing = [[*range(8, 30)]], FeatureSpec((), last=False)
        stepper = greedy_stepper(target, prompts, nothing, 16)
        with torch.inference_mode():
            stepper.prefill()
            logits.append([pass_alone(stepper, nodes)().logits.float() for nodes in (1, 5, 11)])
    for expected, eager, found in zip(*logits, strict=True):
        distances = [float((given - expected).norm()) for given in (eager, found)]
        assert 0 < distances[1] < 1.2 * distances[0]
