"""Attention of few queries, compiled: right in every layout, alike for any number of queries."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from drafthead.backends.compiled import Compiled, has_kernels
from drafthead.backends.compiled_target import CompiledTarget
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.lab.theory.chains import endless, greedy_stepper, pass_alone

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")
CAPACITY = 96  # columns of the cache, of which a pass sees a part
SIZES = [  # rows, heads, heads of keys, queries, columns, size of a head, type of the mask
    (1, 3, 3, 1, 40, 64, torch.bfloat16),
    (1, 4, 2, 8, 33, 32, torch.bfloat16),
    (2, 2, 1, 19, 64, 128, torch.bfloat16),
    (3, 2, 2, 5, 7, 64, torch.float32),
    (1, 2, 2, 9, 16, 256, torch.bfloat16),
    (1, 5, 5, 4, 90, 64, torch.bfloat16),
]


@pytest.fixture(scope="module", params=[1, 2])
def compiled_attention(request) -> Iterator[Compiled]:
    """Attention as a pass has it: columns of a larger cache, any number of rows and queries.

    On one thread, and on two, which share the heads that are left over.
    """

    def attend(query, keys, values, mask) -> torch.Tensor:
        end = mask.shape[-1]
        output = torch.ops.drafthead.attend(query, keys[:, :, :end], values[:, :, :end], mask, 0.1)
        return output.transpose(1, 2).flatten(2)

    made = Compiled(
        attend,
        torch.device("cpu"),
        torch.bfloat16,
        {"query": ". . N .", "keys": ". . . .", "values": ". . . .", "mask": ". . N S"},
        variant=lambda query, keys, values, mask: (query.shape[1], keys.shape, mask.dtype),
    )
    with torch._inductor.config.patch({"cpp.threads": request.param}):
        yield made


def inputs(rows, heads, key_heads, queries, columns, size, mask_type) -> list[torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(rows, queries, heads, size).bfloat16().transpose(1, 2)
    keys, values = torch.randn(2, rows, key_heads, CAPACITY, size).bfloat16()
    hidden = torch.rand(rows, 1, queries, columns) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=mask_type)
    return [query, keys, values, mask.masked_fill(hidden, torch.finfo(mask_type).min)]


@pytest.mark.parametrize("sizes", SIZES)
def test_attention_equals_float64_up_to_the_rounding_of_weights_and_result(
    compiled_attention, sizes
) -> None:
    query, keys, values, mask = inputs(*sizes)
    with torch.inference_mode():
        found = compiled_attention(query, keys, values, mask).double()
    end = mask.shape[-1]
    exact = [tensor.double() for tensor in (query, keys[:, :, :end], values[:, :, :end], mask)]

    def mixed(values: torch.Tensor) -> torch.Tensor:
        output = functional.scaled_dot_product_attention(
            *exact[:2], values, exact[3], scale=0.1, enable_gqa=True
        )
        return output.transpose(1, 2).flatten(2)

    expected, most = mixed(exact[2]), mixed(exact[2].abs())
    rounding = 2**-8  # of a number in bfloat16, at most
    assert ((found - expected).abs() <= rounding * (most + expected.abs()) + 1e-5).all()
    assert (found - expected).abs().mean() < 0.3 * (rounding * most).mean()


def test_a_query_has_the_same_bits_alone_and_among_others(compiled_attention) -> None:
    query, keys, values, mask = inputs(1, 3, 3, 19, 90, 64, torch.bfloat16)
    with torch.inference_mode():
        together = compiled_attention(query, keys, values, mask)
        for count in (1, 4, 8, 11):
            some = compiled_attention(query[:, :, :count], keys, values, mask[:, :, :count])
            assert torch.equal(some, together[:, :count])


def test_compiled_bfloat16_passes_are_as_near_to_float32_as_eager_ones(make_target) -> None:
    """Passes over one token and over several, after the same text."""
    exact = make_target(hidden=128)
    rounded = Target(copy.deepcopy(exact.model).to(torch.bfloat16))
    logits = []
    for target in (exact, rounded, CompiledTarget(rounded)):
        request, nothing = endless([list(range(8, 30))], 1), FeatureSpec((), last=False)
        stepper = greedy_stepper(target, request, nothing, 16)
        with torch.inference_mode():
            stepper.prefill()
            logits.append([pass_alone(stepper, nodes)().logits.float() for nodes in (1, 5, 11)])
    for expected, eager, found in zip(*logits, strict=True):
        distances = [float((given - expected).norm()) for given in (eager, found)]
        assert 0 < distances[1] < 1.2 * distances[0]
