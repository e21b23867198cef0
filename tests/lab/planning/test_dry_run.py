"""Code that runs on tensors without numbers: shapes as in a real run, and the bytes of it."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils.checkpoint import checkpoint

from drafthead.lab.planning.dry_run import DryRun, Ledger


@pytest.fixture
def dry() -> DryRun:
    return DryRun(Ledger(lambda tensor: "all"))


def test_the_peak_counts_what_is_alive_at_once(dry: DryRun) -> None:
    with dry:
        first = torch.zeros(100)  # 400 bytes
        second = first + 1
        del first
        third = second.double()  # 800 bytes
        del second
    assert dry.ledger.at_peak.total() == 1200 and dry.ledger.live.total() == 800
    del third
    assert dry.ledger.live.total() == 0


def test_a_view_is_not_counted_again(dry: DryRun) -> None:
    with dry:
        whole = torch.zeros(100)
        views = whole[10:20], whole.view(10, 10).T
    assert len(views) == 2 and dry.ledger.live.total() == 400


def test_floats_have_no_numbers_and_whole_numbers_do(dry: DryRun) -> None:
    with dry:
        weights, ids = torch.randn(8, 3), torch.arange(8)
        order = torch.rand(8).masked_fill(ids < 6, -1).topk(2).indices
    assert isinstance(weights, FakeTensor) and ids.tolist() == list(range(8))
    assert sorted(order.tolist()) == [6, 7]


def test_masks_of_positions_decide_shapes_as_they_do_for_real(dry: DryRun) -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    with dry:
        states = torch.randn(2, 3, 5)
        chosen = states[mask]
        states[mask] = chosen + 1
        ranks = torch.full((2, 3), 9).masked_scatter(mask, (chosen.sum(-1) > 0).long())
    assert chosen.shape == (3, 5) and ranks.shape == (2, 3)


def test_a_number_that_nobody_has_computed_is_not_invented(dry: DryRun) -> None:
    with dry, pytest.raises(DataDependentOutputException):
        torch.randn(3).sum().item()


def saved_bytes(layers: nn.Module, batch: torch.Tensor, dtype: torch.dtype) -> int:
    """The bytes that a real forward pass keeps, beside the weights and the batch."""
    there = {tensor.untyped_storage().data_ptr() for tensor in (batch, *layers.parameters())}
    sizes = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast(dtype):
        result = layers(batch)
    sizes[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
    return sum(sizes.values())


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_the_backward_pass_is_that_of_a_real_one(
    dry: DryRun, dtype: torch.dtype
) -> None:
    layers = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16), nn.Tanh())
    with dry:
        copy = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16), nn.Tanh())
        batch = torch.randn(10, 16)
        before = dry.ledger.live.total()
        with autocast(dtype):
            result = copy(batch)
        kept = dry.ledger.live.total() - before
        result.sum().backward()
    assert kept == saved_bytes(layers, torch.randn(10, 16), dtype)


def test_a_checkpointed_part_keeps_its_inputs_alone(dry: DryRun) -> None:
    with dry:
        weight = torch.randn(10, 10).requires_grad_()
        batch = torch.randn(100, 10)
        before = dry.ledger.live.total()
        loss = checkpoint(lambda x: (x @ weight).exp().sum(), batch, use_reentrant=False)
        kept = dry.ledger.live.total() - before
        loss.backward()
        assert kept < 100 < 4000 < dry.ledger.at_peak.total() - before


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon])
def test_an_optimiser_makes_the_state_that_it_makes_for_real(dry: DryRun, optimizer) -> None:
    def state_of(weight: nn.Parameter) -> list[tuple[torch.Size, torch.dtype]]:
        weight.grad = torch.zeros_like(weight)
        made = optimizer([weight])
        made.step()
        return [(value.shape, value.dtype) for value in made.state[weight].values()]

    with dry:
        found = state_of(nn.Parameter(torch.randn(6, 4)))
    assert found == state_of(nn.Parameter(torch.randn(6, 4)))
