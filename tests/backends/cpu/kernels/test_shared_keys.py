"""Attention in graphs reads keys that several heads of queries share where they are."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import repeat_kv

from drafthead.backends.compiled import has_kernels
from drafthead.backends.cpu.kernels import rewrites
from drafthead.core.target.target import Target
from drafthead.infer.decoder import decoder_for

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")
attend = torch.ops.drafthead.attend.default


def key_heads(graph: torch.fx.Graph) -> list[list[int]]:
    """Heads of keys and of values that each attention of a graph reads."""
    nodes = graph.find_nodes(op="call_function", target=attend)
    return [[each.meta["val"].shape[1] for each in node.args[1:3]] for node in nodes]


@pytest.mark.parametrize(
    ("repeated", "found"),
    [
        (repeat_kv, [2, 2]),
        (lambda keys, times: keys.repeat(1, times, 1, 1), [6, 6]),  # another order of the heads
        (lambda keys, times: keys[:, :1].expand(-1, 6, -1, -1).clone(), [6, 6]),
    ],
)
def test_copies_for_each_head_are_not_made(repeated, found) -> None:
    def layer(query, keys, values, mask) -> torch.Tensor:
        return torch.ops.drafthead.attend(query, repeated(keys, 3), repeated(values, 3), mask, 0.1)

    torch.manual_seed(0)
    query = torch.randn(1, 6, 3, 32).bfloat16()
    keys, values = torch.randn(2, 1, 2, 8, 32).bfloat16()
    arguments = query, keys, values, torch.zeros(1, 1, 3, 8).bfloat16()
    traced = make_fx(layer, tracing_mode="symbolic")(*arguments)
    rewrites.share_keys(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert key_heads(traced.graph) == [found]
    assert torch.equal(traced(*arguments), layer(*arguments))


def test_the_passes_of_a_model_copy_no_keys(monkeypatch) -> None:
    found: list[list[int]] = []
    share_keys = rewrites.share_keys

    def watched(graph: torch.fx.Graph) -> None:
        share_keys(graph)
        found.extend(key_heads(graph))

    monkeypatch.setattr(rewrites, "share_keys", watched)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=192, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config).bfloat16())
    with torch._inductor.config.patch(force_disable_caches=True):
        decoder_for(target, None, None, compile=True).generate([1, 2, 3], max_new_tokens=3)
    assert found == [[2, 2]] * 2, "in two graphs: one reads prompts, one makes steps"
