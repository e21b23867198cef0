"""Logits by formula are the model's own, and those of chosen tokens are those among all."""

from functools import wraps

import pytest
import torch
from tiny import llama_config, tiny_llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.logit_finish import Finish
from drafthead.core.target.target import Target

CHOSEN = torch.tensor([5, 0, 63])


class Adapted(nn.Linear):
    """An output head that is more than its matrix, as with an adapter."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + hidden.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["plain", "bias", "adapted", "scaled and capped"])
def test_logits_of_chosen_tokens_are_those_among_all(kind: str) -> None:
    target = Target(tiny_llama())
    plain = target.output_head
    if kind in ("bias", "adapted"):
        linear = nn.Linear if kind == "bias" else Adapted
        target.output_head = linear(plain.in_features, plain.out_features)
    if kind == "scaled and capped":
        target.finish = Finish(0.5, 2.0)
    hidden = torch.randn(2, 3, target.hidden_size)
    torch.testing.assert_close(target.project(hidden, CHOSEN), target.project(hidden)[..., CHOSEN])


def tiny_model(name: str, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(name, **sizes, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("name", "settings", "finish"),
    [
        ("llama", {}, Finish()),
        ("granite", {"logits_scaling": 4.0}, Finish(0.25)),
        ("hyperclovax", {"logits_scaling": 0.25}, Finish(0.25)),  # a key of the same name
        ("cohere", {"logit_scale": 0.5}, Finish(0.5)),
        ("gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8}, Finish(1.0, 3.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_a_model_scales_and_caps_its_logits_is_seen(name, settings, finish, dtype) -> None:
    assert Target(tiny_model(name, **settings).to(dtype)).finish == finish


def test_constants_that_a_model_does_not_apply_are_not_applied() -> None:
    model = tiny_llama()
    model.config.final_logit_softcapping, model.config.logit_scale = 2.0, 0.5
    assert Target(model).finish == Finish()


class Shifted(LlamaForCausalLM):
    """Logits that are not what the output head makes of the last hidden state."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *inputs: object, **options: object) -> object:
        output = super().forward(*inputs, **options)
        output.logits = output.logits.roll(1, dims=-1)
        return output


def test_a_model_with_other_logits_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="Shifted is not supported as a target: its logits are not"):
        Target(Shifted(llama_config()))


def test_a_model_without_numbers_is_taken_as_its_configuration_says() -> None:
    with torch.device("meta"):
        model = tiny_model("granite", logits_scaling=4.0)
    assert Target(model).finish == Finish(0.25)
