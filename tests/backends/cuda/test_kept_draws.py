"""Draws from what filters leave, against those of a sorted row; see conftest.py."""

import pytest
import torch
from stages import more

from drafthead.backends.cuda import kept_draws
from drafthead.backends.cuda.backend import RecordingBackend
from drafthead.backends.cuda.kept_draws import draw, first_kept
from drafthead.core import sampling
from drafthead.core.kv_cache.cache_memory import CacheMemory
from drafthead.core.kv_cache.column_cache import FRESH
from drafthead.core.sampling import NO_TOKEN, RowSampling, SamplingConfig, probabilities

DEVICE = torch.device("cpu" if not torch.cuda.is_available() else "cuda")
LAWS = [
    SamplingConfig(0.7, top_p=0.9),
    SamplingConfig(1.0, top_p=1e-6),
    SamplingConfig(1.5, top_p=0.9999),
    SamplingConfig(0.05, top_p=0.5),
    SamplingConfig(1.0, top_k=1),
    SamplingConfig(1e-30, top_k=5, top_p=0.9),
    SamplingConfig(1.3, top_k=20, top_p=0.5, min_p=0.02),
    SamplingConfig(1.0, top_k=89, top_p=0.8),
    SamplingConfig(2.0, min_p=0.1),
    SamplingConfig(3.0, top_k=100),
]


def settings_of(law: SamplingConfig, rows: int) -> torch.Tensor:
    """Settings [B, 4] of rows that are sampled alike."""
    return RowSampling((law,) * rows).settings(DEVICE)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """What an interpreter reads quickly; the last one is not full."""
    monkeypatch.setattr(kept_draws, "WIDTH", 64)


def case(dtype: torch.dtype) -> torch.Tensor:
    """Logits [8, 2, 90], a half of them with many ties, of 0 and -0 as well, and one forbidden."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 2, 90, generator=generator)
    logits[:4] = logits[:4].round()
    logits[..., 11] = -torch.inf
    return logits.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("law", "dtype"),
    [
        *((law, torch.bfloat16) for law in LAWS[::3]),
        *(
            more(law, dtype)
            for dtype in (torch.bfloat16, torch.float32, torch.float16)
            for law in (LAWS[1::3] + LAWS[2::3] if dtype == torch.bfloat16 else LAWS[5:7])
        ),
    ],
    ids=str,
)
def test_the_first_of_what_is_kept_is_found(law: SamplingConfig, dtype: torch.dtype) -> None:
    """Where the quickest tokens are mostly not kept, and by the speeds of races."""
    logits, settings = case(dtype)[2:6, :1], settings_of(law, 4)
    generator = torch.Generator().manual_seed(1)
    kept = probabilities(logits, law) > 0
    has_mass = probabilities(logits, SamplingConfig(law.temperature)) > 0
    speeds = torch.rand(logits.shape, generator=generator).to(DEVICE) * has_mass
    found = first_kept(logits, logits.float().amax(-1, True), speeds, settings)
    assert found.equal((speeds * kept).argmax(-1))
    keys = torch.arange(4, device=DEVICE)[:, None]
    given = keys, settings, True
    assert draw(logits, *given).equal(sampling.draw(logits, *given))


def test_a_row_is_drawn_alike_alone_and_in_a_tree_and_without_filters_by_torch() -> None:
    logits, law = case(torch.bfloat16), LAWS[0]
    keys, settings = torch.arange(16, device=DEVICE).view(8, 2), settings_of(law, 8)
    together = draw(logits, keys, settings, True)
    alone = draw(logits[:, 1:], keys[:, 1:], settings, True)
    assert together[:, 1:].equal(alone)
    given = keys, settings_of(SamplingConfig(1.0), 8), False
    assert draw(logits, *given).equal(sampling.draw(logits, *given))


def test_each_row_has_a_law_of_its_own() -> None:
    """Bit by bit that which it has alone; a greedy row its most probable token."""
    logits, laws = case(torch.bfloat16), (SamplingConfig(), SamplingConfig(1.0), *LAWS[:6])
    keys = torch.arange(16, device=DEVICE).view(8, 2)
    together = draw(logits, keys, RowSampling(laws).settings(DEVICE), True)
    assert together[0].equal(sampling.most_probable(logits[0]))
    for row, law in enumerate(laws[1:], 1):
        alone = [each[row : row + 1] for each in (logits, keys)]
        drawn = draw(*alone, settings_of(law, 1), not law.whole)
        assert drawn.equal(together[row : row + 1])


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_a_law_give_no_token(odd: float) -> None:
    logits = torch.zeros(3, 1, 70, device=DEVICE)
    logits[1, :, 3 if odd != -torch.inf else slice(None)] = odd
    keys, settings = torch.arange(3, device=DEVICE)[:, None], settings_of(LAWS[0], 3)
    drawn = draw(logits, keys, settings, True)
    assert drawn[1] == NO_TOKEN and (drawn[[0, 2]] >= 0).all()


def test_steps_on_a_gpu_draw_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheMemory, "on", lambda _: FRESH)  # which asks the device
    backend = RecordingBackend(torch.device("cuda"), fuses=False)
    assert backend.replacement_of(sampling.draw) is draw
