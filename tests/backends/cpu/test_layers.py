"""Layers that are alike are compiled once, and every pass gives what uncompiled ones give."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import tiny_llama
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from drafthead.backends import compiled
from drafthead.backends.compiled import Compiled, Made
from drafthead.backends.compiled_target import CompiledTarget
from drafthead.backends.cpu.layers import layer_code
from drafthead.backends.cpu.layers.callable_code import ENTRY, RELEASE, for_calls
from drafthead.backends.cpu.layers.layer_code import LayerTable
from drafthead.backends.cpu.layers.layer_stack import LayerStack, check_output, without_numbers
from drafthead.backends.recorded_calls import LayerCall, LayerTensors, UnlikeError, recorded
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup

TEXT = [9, 10, 11, 12, 30, 31, 32, 9, 10, 11, 12, 30, 31, 32, 40, 9, 10, 11]  # lookup drafts much
FEWEST = 2  # layers that are worth compiling apart, here
SMALL = {"hidden_size": 32, "num_hidden_layers": FEWEST}


@pytest.fixture(autouse=True)
def few_layers(monkeypatch) -> None:
    """Models of two layers are compiled in a quarter of the time of larger ones."""
    monkeypatch.setattr(compiled, "FEWEST", FEWEST)


@pytest.fixture
def stacks(monkeypatch) -> Iterator[list[LayerStack | None]]:
    """How the layers of each graph of a pass were compiled, as the graphs are made."""
    found: list[LayerStack | None] = []
    make = Compiled.make

    def noted(self: Compiled, arguments: Any) -> Made:
        made = make(self, arguments)
        if self.layers:
            found.append(getattr(made.graph, "stack", None))
        return made

    monkeypatch.setattr(Compiled, "make", noted)
    yield found


def windowed() -> nn.Module:
    """A model whose layers are of two kinds in turn."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * FEWEST
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2 * FEWEST,
        num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
        layer_types=kinds, initializer_range=0.3, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "prompts", "kinds"),
    [
        pytest.param(lambda: tiny_llama(**SMALL), [TEXT], 1, id="alike"),
        pytest.param(
            windowed, [TEXT, TEXT[3:]], 2, id="of two kinds, two rows", marks=pytest.mark.slow
        ),
    ],
)
def test_answers_are_the_uncompiled_ones(make, prompts: list[list[int]], kinds, stacks) -> None:
    """In passes over one node and over trees, and for rows that end one after the other."""
    target = Target(make())
    plain = Decoder(target).generate(prompts, max_new_tokens=40).sequences
    decoder = Decoder(CompiledTarget(target), PromptLookup(4), Budget(5, 4))
    assert decoder.generate(prompts, max_new_tokens=40).sequences == plain
    assert stacks
    for stack in stacks:
        assert stack is not None
        assert len({code.address for code in stack.codes}) == kinds
        assert len(stack.codes) == FEWEST * kinds


class Numbered(LlamaDecoderLayer):
    """A layer that computes something else where its number is odd, which no attribute tells."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        output = super().forward(hidden_states, **options)
        return output * (1 + self.self_attn.layer_idx % 2)


def test_a_layer_that_computes_something_else_is_noticed(stacks, caplog) -> None:
    """All layers are then compiled, and the answers are right as well."""
    caplog.set_level("INFO")
    model = tiny_llama(**SMALL)
    for layer in model.model.layers:
        layer.__class__ = Numbered
    target = Target(model)
    plain = Decoder(target).generate([TEXT], max_new_tokens=40).sequences
    assert Decoder(CompiledTarget(target)).generate([TEXT], max_new_tokens=40).sequences == plain
    assert stacks == [None]
    assert "all layers are compiled, which takes longer: a layer's output differs" in caplog.text


def test_the_last_bit_of_large_numbers_is_no_error_of_a_layer() -> None:
    """In bfloat16 the number after 1,024 is 1,032; the layer adds 1 to the other numbers."""
    hidden = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    hidden[..., 0] = 1024
    output = hidden + torch.tensor([0.0] + 7 * [1.0], dtype=torch.bfloat16)
    none = torch.empty(0)
    call = LayerCall((), LayerTensors(hidden, none, none, none, ()), output, in_tuple=False)
    rounded = output.clone()
    rounded[..., 0] = 1032
    check_output(rounded, call)
    rounded[..., 3] = 0.5
    with pytest.raises(UnlikeError, match="differs by"):
        check_output(rounded, call)


def test_a_pass_that_cannot_call_its_layers_is_compiled_whole(stacks, caplog, monkeypatch) -> None:
    """Here because the sizes of the pass are not those that the code of a layer was made for."""
    caplog.set_level("INFO")
    monkeypatch.setattr(layer_code, "conditions", lambda *_: lambda _: False)
    # A size of its own: no graph that calls these layers is on the disk.
    target = Target(tiny_llama(**SMALL, intermediate_size=96))
    plain = Decoder(target).generate([TEXT], max_new_tokens=40).sequences
    assert Decoder(CompiledTarget(target)).generate([TEXT], max_new_tokens=40).sequences == plain
    assert stacks == [None]
    assert "all layers are compiled, which takes longer: this model" in caplog.text


def test_other_weights_run_the_same_code(stacks) -> None:
    """Weights of another model of the same shape, and weights that a model is given later."""
    targets = [Target(tiny_llama(seed, **SMALL)) for seed in (0, 1)]
    faster = [CompiledTarget(target) for target in targets]
    for _ in range(2):
        plain = [Decoder(t).generate([TEXT], max_new_tokens=30).sequences for t in targets]
        found = [Decoder(t).generate([TEXT], max_new_tokens=30).sequences for t in faster]
        assert found == plain
        assert plain[0] != plain[1]
        with torch.no_grad():
            targets[1].layers[1].mlp.down_proj.weight.neg_()
    assert len(stacks) == 3  # the changed model's graph was made again
    assert len({code.address for stack in stacks if stack for code in stack.codes}) == 1


def test_constants_are_freed_with_the_table_that_names_them() -> None:
    constant = torch.ones(3)
    alive = weakref.ref(constant)
    table = LayerTable([0], [[constant]])
    del constant
    gc.collect()
    assert alive() is not None
    del table
    gc.collect()
    assert alive() is None


class Layers(nn.Module):
    """Layers that run in a given order."""

    def __init__(self, order: list[int]):
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Identity() for _ in range(3)), order

    def forward(self) -> None:
        for number in self.order:
            self.layers[number](torch.ones(1, 1, 4))


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [0, 1], [0, 0, 1, 2]])
def test_only_layers_that_run_one_after_the_other_with_a_cache_are_compiled_apart(order) -> None:
    model = Layers(order)
    own = [layer.forward for layer in model.layers]
    with pytest.raises(UnlikeError):
        recorded(list(model.layers), model)
    assert [layer.forward for layer in model.layers] == own


def test_code_that_other_code_can_call_takes_no_lock_of_python() -> None:
    source = f"{ENTRY}Handle* inputs) {{ {RELEASE} }}"
    assert RELEASE not in for_calls(source)
    assert "void layer_entry(" in for_calls(source)
    for unknown in (ENTRY, RELEASE, source + RELEASE, source + "custom_op_wrapper"):
        with pytest.raises(ValueError, match="another form"):
            for_calls(unknown)


def test_layers_that_only_have_other_numbers_are_alike() -> None:
    def layer(number: int, window: int) -> list[Any]:
        return [["Attention", [["layer_idx", number], ["window", window]]], ["Norm", []]]

    assert without_numbers(layer(0, 8)) == without_numbers(layer(1, 8))
    assert without_numbers(layer(0, 8)) != without_numbers(layer(0, 9))
