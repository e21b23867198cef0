"""Draft layers against transformers' Llama, and the cache against one pass without it."""

import pytest
import torch
from tiny import llama_config
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafthead.core.target.target import Target
from drafthead.heads.layers.cache import DraftCache
from drafthead.heads.layers.decoder_layer import DecoderLayer, LayerConfig, Rotary

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(params=[{"rope_type": "default", "rope_theta": 500.0}, LLAMA3])
def pair(request) -> tuple[LayerConfig, DecoderLayer, LlamaDecoderLayer]:
    """A layer shaped like a target's, with the weights of transformers' own."""
    config = llama_config(
        vocab_size=16, num_hidden_layers=1, head_dim=12, rms_norm_eps=1e-3,
        rope_parameters=request.param,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = LlamaDecoderLayer(config, 0).requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    shape = LayerConfig().like(Target(LlamaForCausalLM(config)))
    ours = DecoderLayer(shape).requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    return shape, ours, theirs


def test_a_layer_equals_transformers_llama_layer(pair) -> None:
    shape, ours, theirs = pair
    hidden, positions = torch.randn(2, 9, 32), torch.arange(40, 49).expand(2, 9)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    blocked = torch.zeros(1, 1, 9, 9).masked_fill(~causal, torch.finfo(torch.float32).min)
    rotation = LlamaRotaryEmbedding(theirs.self_attn.config)(hidden, positions)
    expected = theirs(hidden, attention_mask=blocked, position_embeddings=rotation)
    found = ours(hidden, Rotary.of(shape)(positions), causal)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_shape_keeps_what_is_given_and_takes_the_rest_from_the_target(target) -> None:
    shape = LayerConfig(intermediate_size=40, num_key_value_heads=1).like(target)
    assert (shape.intermediate_size, shape.num_key_value_heads) == (40, 1)
    assert (shape.hidden_size, shape.num_attention_heads, shape.head_dim) == (32, 4, 8)
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_reading_through_the_cache_equals_one_pass_over_all(pair) -> None:
    """Rows advance by different amounts, drafted nodes come and go, one row is dropped."""
    shape, layer, _ = pair
    rotary, cache = Rotary.of(shape), DraftCache([layer], rows=3)
    length = 300  # past the first capacity
    hidden = torch.randn(3, length, 32)
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    expected = layer(hidden, rotary(torch.arange(length).expand(3, length)), causal)

    def passed(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count = states.shape[1]
        new = torch.ones(count, count, dtype=torch.bool).tril()[None]
        seen = torch.ones(1, count, cache.pending, dtype=torch.bool)
        mask = cache.mask(torch.cat([seen, new], dim=-1))
        seen_by = cache.view(count).opened()
        output = layer(states, rotary(positions), mask, lambda k, v: seen_by.append(0, k, v))
        cache.keep_pending(count)
        return output

    generator = torch.Generator().manual_seed(0)
    rows, read = [0, 1, 2], [0, 0, 0]
    while min(read) < length - 8:
        most = 120 if sum(read) == 0 else 7
        counts = torch.randint(1, most + 1, (len(rows),), generator=generator)
        places = torch.tensor(read)[:, None] + torch.arange(int(counts.max()))
        states = hidden[torch.tensor(rows)[:, None], places.clamp_max(length - 1)]
        output = passed(states, places)
        cache.commit_first(counts, counts.tolist())
        for place, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            start, end = read[place], min(read[place] + count, length)
            torch.testing.assert_close(
                output[place, : end - start], expected[row, start:end], atol=1e-5, rtol=1e-5
            )
            read[place] += count
        for _ in range(2):  # drafted nodes, which leave no trace
            passed(torch.randn(len(rows), 2, 32), torch.tensor(read)[:, None] + torch.arange(2))
        cache.discard()
        if len(rows) == 3 and min(read) > 100:
            cache.keep_rows(torch.tensor([2, 0]))
            rows, read = [2, 0], [read[2], read[0]]
    assert rows == [2, 0]
