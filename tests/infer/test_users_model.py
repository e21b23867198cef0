"""A user's model after a Decoder is what it was before: its mode, its gradients, its hooks."""

import pytest
import torch
from conftest import REPRESENTATIVES
from tiny import random_prompts, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.core.target.target import Target
from drafthead.infer import Decoder

PROMPTS = random_prompts(2)


def mode_of(model: torch.nn.Module) -> list[tuple[bool, int]]:
    """The mode and the hooks of each module, and which weights are to be trained."""
    modes = [
        (part.training, len(part._forward_hooks) + len(part._forward_pre_hooks))
        for part in model.modules()
    ]
    return [*modes, *((weight.requires_grad, 0) for weight in model.parameters())]


@pytest.mark.parametrize("name", ["none", *REPRESENTATIVES])
def test_a_model_in_training_is_decoded_as_in_evaluation(make_drafter, name) -> None:
    """Dropout alone would change its answers, and the loop around goes on training."""
    model = tiny_llama(eos_token_id=None, attention_dropout=0.5).train()
    model.model.layers[1].eval()  # a part that the user keeps out of training
    model.model.embed_tokens.requires_grad_(False)
    before, plain = mode_of(model), Target(tiny_llama(eos_token_id=None))
    expected = Decoder(plain).generate(PROMPTS, max_new_tokens=12).sequences
    target = Target(model)
    decoder = Decoder(target, None if name == "none" else make_drafter(name, target))
    assert decoder.generate(PROMPTS, max_new_tokens=12).sequences == expected
    for _ in zip(decoder.steps(PROMPTS, max_new_tokens=12), range(2), strict=False):
        assert mode_of(model) == before, "between two passes as well"
    assert mode_of(model) == before and all(w.grad is None for w in model.parameters())
    loss = model(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
    loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_checkpointing_does_not_disturb_decoding(kind) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64}  # fmt: skip
    config = AutoConfig.for_model(
        kind, vocab_size=64, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    expected = Decoder(Target(model)).generate([[9, 10, 11]], max_new_tokens=6).sequences
    model.train().gradient_checkpointing_enable()
    assert Decoder(Target(model)).generate([[9, 10, 11]], max_new_tokens=6).sequences == expected
    assert model.training
