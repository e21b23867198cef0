"""Tokens drawn by the kernel: those that torch draws, along the path that they accept."""

import pytest
import torch

from drafthead.backends.cpu.kernels import library
from drafthead.core import sampling
from drafthead.core.sampling import NO_TOKEN, RowSampling, SamplingConfig, probabilities, race

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
CPU = torch.device("cpu")
FILTERS = [
    SamplingConfig(0.7),
    SamplingConfig(1.0, top_k=3),
    SamplingConfig(0.7, top_p=0.9),
    SamplingConfig(1.0, min_p=0.1),
    SamplingConfig(1.3, top_k=40, top_p=0.5, min_p=0.01),
    SamplingConfig(0.7, top_k=2, top_p=0.99),
]
PARENTS = torch.tensor([-1, 0, 0, 2])


kernel = torch.ops.drafthead.draw


def settings_of(law: SamplingConfig, rows: int) -> torch.Tensor:
    """Settings [B, 4] of rows that are sampled alike."""
    return RowSampling((law,) * rows).settings(CPU)


def case(dtype: torch.dtype, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [200, 4, V], half of them with many ties, and keys [200, 4]."""
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(200, 4, size, generator=generator)
    logits[:100] = logits[:100].round()
    return logits.to(dtype), torch.randint(-(2**63), 2**63 - 1, (200, 4), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 64, 1000])
def test_drawn_tokens_are_those_of_torch(dtype, size) -> None:
    """Of the root, of the second child, which is the root's token, and of its child, which is not.

    The first child's token is another one, so nothing is drawn after it.
    """
    logits, keys = case(dtype, size)
    for law in FILTERS:
        settings = settings_of(law, 200)
        expected = race(probabilities(logits, law), keys)
        of_torch = sampling.draw(logits, keys, keys, keys, settings, not law.whole)
        assert torch.equal(of_torch, expected)
        root, second = expected[:, 0], expected[:, 2]
        tokens = torch.stack([root, (root + 1) % size, root, (second + 1) % size], 1)
        parents = PARENTS.repeat(200, 1)
        found = kernel(logits, tokens, parents, keys, settings, False)
        on_path = torch.tensor([True, False, True, False])
        assert torch.equal(found, torch.where(on_path, expected, NO_TOKEN)), law


def test_each_row_has_a_law_of_its_own() -> None:
    """Bit by bit that which it has alone; a greedy row its most probable token."""
    logits, keys = case(torch.bfloat16, 64)
    laws = [SamplingConfig(), SamplingConfig(1.0), *FILTERS][:8]
    logits, keys, tokens = (
        logits[100:108, :1],
        keys[100:108, :1],
        torch.zeros(8, 1, dtype=torch.long),
    )
    tree = tokens, tokens - 1, keys
    with torch.inference_mode():
        found = kernel(logits, *tree, RowSampling(tuple(laws)).settings(CPU), False)
        assert torch.equal(found[0], sampling.most_probable(logits[0]))
        for row, law in enumerate(laws):
            own = [each[row : row + 1] for each in (logits, *tree)]
            alone = kernel(*own, settings_of(law, 1), False)
            assert torch.equal(found[row], alone[0]), law


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("law", FILTERS[:3], ids=str)
def test_logits_without_a_law_give_no_token(dtype, law) -> None:
    """NaN anywhere, +inf anywhere, -inf everywhere; the rows between them are sound."""
    logits, keys = case(dtype, 64)
    logits, keys = logits[:16, :2].clone(), keys[:16, :2]
    for row, place in zip((1, 3, 5), (0, 32, 63), strict=True):
        logits[row, 0, place], logits[row + 6, 0, place] = torch.nan, torch.inf
    logits[13] = -torch.inf
    tree = torch.zeros(16, 2, dtype=torch.long), PARENTS[:2].repeat(16, 1)
    found = kernel(logits, *tree, keys, settings_of(law, 16), False)[:, 0]
    assert (found == NO_TOKEN).nonzero().flatten().tolist() == [1, 3, 5, 7, 9, 11, 13]
