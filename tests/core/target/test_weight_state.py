"""What a model has read is used again while it would read the same, and no longer."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama
from torch import nn
from transformers import PreTrainedModel

from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.hooks import Taps
from drafthead.core.target.target import Target
from drafthead.core.target.weight_state import state_of

Change = Callable[[PreTrainedModel], object]


def up(model: PreTrainedModel) -> nn.Linear:
    return model.model.layers[0].mlp.up_proj


@torch.no_grad()
def trained(model: PreTrainedModel) -> None:
    up(model).weight.add_(0.01)


def replaced(model: PreTrainedModel) -> None:
    """By one of the same values, so that nothing but the object tells."""
    up(model).weight = nn.Parameter(up(model).weight.detach().clone())


def in_other_memory(model: PreTrainedModel) -> None:
    up(model).weight.data = up(model).weight.data.clone()


def same_memory_other_weight(model: PreTrainedModel) -> None:
    data = up(model).weight.data
    data.mul_(2)
    up(model).weight = nn.Parameter(data.view_as(data).data)


def other_activation(model: PreTrainedModel) -> None:
    """Without weights, and with attributes of the same values."""
    activation = model.model.layers[0].mlp.act_fn
    other = nn.Mish()
    assert type(activation) is not type(other)
    vars(other).update(vars(activation))
    model.model.layers[0].mlp.act_fn = other


def other_switch(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def steered(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, output: output)


CHANGES = [trained, replaced, in_other_memory, same_memory_other_weight, other_activation,
           other_switch, steered]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_each_single_change_is_another_state(change: Change) -> None:
    model = tiny_llama()
    before = state_of(model)
    assert state_of(model) == before
    change(model)
    assert state_of(model) != before


def test_a_weight_at_the_address_of_an_earlier_one_is_another_state() -> None:
    """The allocator gives memory that was freed to the next of the same size."""
    model = tiny_llama()
    replaced(model)
    before, address = state_of(model), up(model).weight.data_ptr()
    for _ in range(100):
        replaced(model)
        assert state_of(model) != before
        if up(model).weight.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator never gave that memory back")


def test_adapters_that_are_switched_are_another_state_and_back_again_the_first() -> None:
    options = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), options, adapter_name="first")
    model.add_adapter("second", options)
    first = state_of(model.base_model.model)
    model.set_adapter("second")
    assert state_of(model.base_model.model) != first
    model.set_adapter("first")
    assert state_of(model.base_model.model) == first
    with model.disable_adapter():
        assert state_of(model.base_model.model) != first


def test_passes_and_training_mode_change_no_state() -> None:
    """Another thread's pass has its hooks on the model, and passes are the same in any mode."""
    target = Target(tiny_llama().eval())
    before = state_of(target.model)
    with Taps(target, FeatureSpec(layers=(0,))):
        assert state_of(target.model) == before
    target.model.train()
    assert state_of(target.model) == before
