"""Optimisers and schedules: who trains which parameter, and how fast at which moment."""

import pytest
import torch
from torch import nn

from drafthead.train.optimizers import (
    Float32Muon,
    OptimizerConfig,
    build_optimizers,
    lr_share,
    muon_for,
    set_learning_rates,
)
from drafthead.train.run.config import Duration
from drafthead.train.run.folder import Progress
from drafthead.train.settings import TrainConfig


def small_net() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"embed": nn.Embedding(7, 4), "block": nn.Linear(4, 4), "output": nn.Linear(4, 7)}
    )


def trained_by(optimizers: list[torch.optim.Optimizer], net: nn.Module) -> dict[str, str]:
    names = {id(p): name for name, p in net.named_parameters()}
    return {
        names[id(p)]: type(optimizer).__name__
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    net = small_net()
    owners = trained_by(build_optimizers(net.named_parameters(), OptimizerConfig("muon")), net)
    assert owners == {
        "embed.weight": "AdamW",
        "block.weight": muon_for(torch.device("cpu")).__name__,
        "block.bias": "AdamW",
        "output.weight": "AdamW",
        "output.bias": "AdamW",
    }


@pytest.mark.parametrize(
    ("device", "instructions", "expected"),
    [
        ("cpu", {"avx2": True}, Float32Muon),
        ("cpu", {"avx512_bf16": True}, torch.optim.Muon),
        ("cuda", {"avx2": True}, torch.optim.Muon),
    ],
)
def test_muon_is_that_of_the_processor(monkeypatch, device: str, instructions, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert muon_for(torch.device(device)) is expected


@pytest.mark.parametrize("shape", [(6, 40), (40, 6)])
def test_muon_in_float32_makes_the_update_of_muon_without_its_rounding(shape: tuple[int, int]):
    """Beside torch's formula in float64."""
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    steps = {}
    for kind in (torch.optim.Muon, Float32Muon):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = gradient.clone()
        kind([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        steps[kind] = -weight.detach() / (0.2 * 40**0.5)
        assert torch.equal(weight.grad, gradient)
    x = gradient.double() if shape[0] < shape[1] else gradient.double().T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    exact = x if shape[0] < shape[1] else x.T
    errors = {kind: float((step - exact).abs().max()) for kind, step in steps.items()}
    assert errors[Float32Muon] < 1e-4 < errors[torch.optim.Muon] < 0.1


def test_adamw_takes_everything_that_is_trained():
    net = small_net()
    net["embed"].requires_grad_(False)
    owners = trained_by(build_optimizers(net.named_parameters(), OptimizerConfig()), net)
    assert set(owners.values()) == {"AdamW"}
    assert "embed.weight" not in owners


def test_nothing_to_train_is_an_error():
    net = small_net().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        build_optimizers(net.named_parameters(), OptimizerConfig())


def test_the_rate_warms_up_and_falls_to_its_end():
    linear = OptimizerConfig(schedule="linear", warmup_ratio=0.2)
    shares = [lr_share(linear, progress) for progress in (0.0, 0.1, 0.2, 0.6, 1.0, 1.1)]
    assert shares == pytest.approx([0, 0.5, 1, 0.5, 0, 0])
    cosine = OptimizerConfig(schedule="cosine", warmup_ratio=0, final_lr_ratio=0.1)
    assert [lr_share(cosine, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1, 0.55, 0.1])
    constant = OptimizerConfig(schedule="constant", warmup_ratio=0.5)
    assert [lr_share(constant, p) for p in (0.25, 0.5, 1.0)] == [0.5, 1, 1]
    only_warmup = OptimizerConfig(schedule="linear", warmup_ratio=1)
    assert [lr_share(only_warmup, p) for p in (0.5, 1.0)] == [0.5, 1]


def test_steps_are_taken_at_their_middle():
    linear, duration = OptimizerConfig(schedule="linear", warmup_ratio=0), Duration(4, "step")
    used = [duration.share_at_next_step(Progress(step), step_seconds=9) for step in range(4)]
    shares = [lr_share(linear, share) for share in used]
    assert shares == pytest.approx([0.875, 0.625, 0.375, 0.125])


def test_each_optimizer_gets_its_own_peak():
    net = small_net()
    optimizers = build_optimizers(net.named_parameters(), OptimizerConfig("muon"))
    assert set_learning_rates(optimizers, [0.02, 0.001], 0.5) == [0.01, 0.0005]
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.01, 0.0005]


def test_a_budget_counts_steps_epochs_or_minutes():
    steps = Duration.of(TrainConfig("out", epochs=2, batch_rows=4), num_rows=10)
    assert (steps.limit, steps.unit) == (5, "step")
    assert steps.is_used(Progress(step=5)) and not steps.is_used(Progress(step=4))
    assert steps.share_at_next_step(Progress(step=2), step_seconds=9) == 0.5
    minutes = Duration.of(TrainConfig("out", max_minutes=2), num_rows=10)
    assert (minutes.limit, minutes.unit) == (120, "s")
    assert minutes.share_at_next_step(Progress(seconds=59), step_seconds=2) == 0.5
