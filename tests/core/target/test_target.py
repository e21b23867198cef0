"""The target adapter on several architectures: the same features as transformers itself gives."""

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    Qwen3Config,
)

from drafthead.core.errors import UserError
from drafthead.core.target import loading
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ),
    "qwen3": Qwen3Config(**SIZES, max_position_embeddings=64),
    "mistral": MistralConfig(**SIZES, max_position_embeddings=128, sliding_window=40),
    "gemma2": Gemma2Config(
        **SIZES, max_position_embeddings=128, sliding_window=40, query_pre_attn_scalar=8
    ),
}  # fmt: skip


@pytest.fixture(params=sorted(CONFIGS))
def other_target(request) -> Target:
    """A tiny random model of another architecture, dropout off."""
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval())


def test_taps_are_the_outputs_of_layers_and_the_final_norm(other_target) -> None:
    ids = torch.randint(2, 50, (2, 9))
    positions = torch.arange(9).expand_as(ids)
    output = other_target.run(ids, positions, None, FeatureSpec(layers=(0, 1), last=True))
    reference = other_target.model(ids, output_hidden_states=True)
    # transformers puts the embeddings first, and gives the last one after the final norm.
    for tap, expected in zip(output.features.taps, reference.hidden_states[1:3], strict=True):
        torch.testing.assert_close(tap, expected)
    torch.testing.assert_close(output.features.last, reference.hidden_states[-1])
    torch.testing.assert_close(other_target.project(output.features.last), reference.logits)


def test_a_text_is_read_without_logits(other_target) -> None:
    ids = torch.randint(2, 50, (2, 9))
    positions = torch.arange(9).expand_as(ids)
    spec = FeatureSpec(layers=(0,), last=True)
    expected = other_target.run(ids, positions, None, spec).features
    widths = []
    other_target.output_head.register_forward_hook(
        lambda module, inputs, output: widths.append(output.shape[1])
    )
    found = other_target.read(ids, positions, None, spec)
    assert widths == [0 if other_target.skips_logits else 9]
    assert torch.equal(found.last, expected.last)
    assert torch.equal(found.taps[0], expected.taps[0])


def test_taps_around_the_layers_are_the_embeddings_and_the_final_norm(other_target) -> None:
    ids = torch.randint(2, 50, (2, 9))
    positions = torch.arange(9).expand_as(ids)
    around = FeatureSpec(layers=(3, -1), last=False)
    final, embedded = other_target.run(ids, positions, None, around).features.taps
    reference = other_target.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(embedded, reference[0])
    torch.testing.assert_close(final, reference[3])


def test_taps_outside_the_model_are_refused(target) -> None:
    ids = torch.tensor([[1, 2]])
    with pytest.raises(UserError, match=r"layers 0 to 1.*taps \[3\]"):
        target.run(ids, torch.tensor([[0, 1]]), None, FeatureSpec(layers=(3,)))


def test_hooks_are_gone_after_a_pass(target) -> None:
    target.run(torch.tensor([[1]]), torch.tensor([[0]]), None, FeatureSpec(layers=(0,)))
    assert not target.layers[0]._forward_hooks
    assert not target.final_norm._forward_hooks


def test_a_name_that_can_only_be_a_folder_is_refused_before_the_hub_is_asked(monkeypatch) -> None:
    monkeypatch.setattr(
        loading.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked")
    )
    for name in ("nosuch", "./runs/mine", "a/b/c"):
        with pytest.raises(UserError, match="this folder does not exist"):
            loading.configuration_of(name, trust_code=False)


def test_a_hub_that_is_away_is_asked_once(monkeypatch) -> None:
    def away(*_, **__) -> None:
        raise OSError("no connection") from LocalEntryNotFoundError("nothing in the cache")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", away)
    with pytest.raises(UserError, match="OWNER/NAME: .* the hub cannot be reached"):
        loading.configuration_of("OWNER/NAME", trust_code=False)
