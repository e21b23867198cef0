"""Tokens drawn by a compiled pass: those that the sums of the probabilities name."""

import pytest
import torch

from drafthead.heads import sampling
from drafthead.heads.graphs.compiled import Compiled
from drafthead.heads.graphs.kernels import linear
from drafthead.heads.graphs.substitutions import replacement_of
from drafthead.heads.sampling import NO_TOKEN

pytestmark = pytest.mark.skipif(
    not linear.has_kernel(), reason="this processor does not compute in bfloat16 by AVX512"
)


def compiled() -> Compiled:
    """Any number of rows, of logits as they come out of a product."""
    draw = replacement_of(sampling.draw, has_kernels=True)
    return Compiled(
        lambda logits, temperature, uniform: draw(logits + 0, temperature, uniform),
        torch.device("cpu"),
        torch.bfloat16,
        {"logits": "B . .", "temperature": "", "uniform": "B ."},
        variant=lambda logits, temperature, uniform: (logits.dtype, *logits.shape[1:]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 64, 1000])
def test_drawn_tokens_are_those_of_torchs_sums(dtype, size, sizes_rendered) -> None:
    """All but those so near to the edge between two tokens that rounding decides."""
    rendered = sizes_rendered("draw")
    torch.manual_seed(size)
    logits = (3 * torch.randn(600, 2, size)).to(dtype)
    uniform, temperature = torch.rand(600, 2, dtype=torch.float64), torch.tensor(0.7)
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        found = compiled()(logits, temperature, uniform)
    assert rendered
    sums = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    from_edge = (sums - uniform[..., None].double()).abs().amin(-1)
    expected = sampling.draw(logits, temperature, uniform)
    assert torch.equal(found[from_edge > 1e-6], expected[from_edge > 1e-6])
    assert (from_edge > 1e-6).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 64, 1000])
def test_logits_without_a_law_give_no_token(dtype, size) -> None:
    """NaN anywhere, +inf anywhere, -inf everywhere; the rows between them are sound."""
    torch.manual_seed(size)
    logits = torch.randn(16, 1, size).to(dtype)
    for row, place in zip((1, 3, 5), (0, size // 2, size - 1), strict=True):
        logits[row, 0, place], logits[row + 6, 0, place] = torch.nan, torch.inf
    logits[13] = -torch.inf
    uniform = torch.rand(16, 1, dtype=torch.float64)
    with torch.inference_mode():
        found = compiled()(logits, torch.tensor(0.7), uniform)
    assert (found == NO_TOKEN).flatten().nonzero().flatten().tolist() == [1, 3, 5, 7, 9, 11, 13]
    assert torch.equal(found == NO_TOKEN, sampling.draw(logits, torch.tensor(0.7), uniform) < 0)


def test_tokens_without_mass_are_never_drawn() -> None:
    logits = torch.full((4, 1, 200), -torch.inf)
    logits[:, 0, 70], logits[:, 0, 130] = 1.0, 1.0
    uniform = torch.tensor([0.0, 0.25, 0.75, 1 - 2**-24])[:, None]
    with torch.inference_mode():
        found = compiled()(logits, torch.tensor(1.0), uniform)
    assert found.flatten().tolist() == [70, 70, 130, 130]
