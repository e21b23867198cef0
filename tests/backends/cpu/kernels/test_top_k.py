"""The few largest of many numbers, compiled: torch's own choice, in the order of the places."""

import pytest
import torch

from drafthead.backends.compiled import Compiled, has_kernels

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")


def compiled(count: int) -> Compiled:
    """`topk` as drafts use it, of any number of rows."""

    def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = x.float().topk(count, dim=-1)
        return values + 0, places

    return Compiled(best, torch.device("cpu"), torch.bfloat16, {"x": "B . ."})


@pytest.mark.parametrize(
    ("count", "size", "used"), [(1, 5, True), (8, 4096, True), (64, 101, True), (65, 200, False)]
)
def test_values_and_places_are_those_of_a_stable_sort(sizes_rendered, count, size, used) -> None:
    torch.manual_seed(count)
    rendered = sizes_rendered("top_k")
    best = compiled(count)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 3, size).bfloat16()  # rounded, so that many are equal
        with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
            values, places = best(x)
        expected = x.float().sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, expected.values[..., :count])
        if used:
            assert torch.equal(places, expected.indices[..., :count])
    assert set(rendered) == ({count} if used else set())


def test_places_differ_even_where_most_numbers_are_minus_infinity() -> None:
    x = torch.full((1, 1, 40), -torch.inf).bfloat16()
    x[..., 33] = 1.0
    with torch.inference_mode():
        _, places = compiled(4)(x)
    assert places.flatten().tolist() == [33, 0, 1, 2]
