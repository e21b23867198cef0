"""A model gets its cache under the name that its own code gives the argument."""

import warnings
from typing import Any

import pytest
import torch
from hidden_answers import generated
from tiny import llama_config, tiny_encoder_decoder, tiny_llama
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from drafthead.core.target.any_target import target_of
from drafthead.core.target.architecture import cache_argument
from drafthead.core.target.target import Target
from drafthead.infer import Decoder

HERE = cache_argument(LlamaForCausalLM.forward)  # the name in the installed transformers
PROMPT, NEW = [9, 10, 11, 9, 10], 12


class OldName(LlamaForCausalLM):
    """As code from elsewhere that has not followed transformers 5.24."""

    def forward(self, input_ids, past_key_values: Cache | None = None, **options: Any) -> Any:
        return super().forward(input_ids, **{HERE: past_key_values}, **options)


class NewName(LlamaForCausalLM):
    """As code from elsewhere that is ahead of transformers 5.23."""

    def forward(self, input_ids, cache: Cache | None = None, **options: Any) -> Any:
        return super().forward(input_ids, **{HERE: cache}, **options)


def test_the_name_is_that_of_the_signature() -> None:
    assert cache_argument(OldName.forward) == "past_key_values"
    assert cache_argument(NewName.forward) == "cache"
    assert cache_argument(lambda cache, past_key_values: None) == "past_key_values"
    assert cache_argument(torch.nn.Linear.forward) == ""


@pytest.mark.parametrize("kind", [OldName, NewName])
def test_a_model_with_either_name_decodes_alike(kind: type[LlamaForCausalLM]) -> None:
    plain = tiny_llama()
    model = kind(llama_config())
    model.load_state_dict(plain.state_dict())
    decoder = Decoder.from_pretrained(Target(model), draft="lookup", tree_nodes=4)
    result = decoder.generate([PROMPT], max_new_tokens=NEW)
    assert result.sequences == [generated(plain, PROMPT, NEW)]


@pytest.mark.parametrize("model", [tiny_llama(), tiny_encoder_decoder("bart")], ids=type)
def test_transformers_has_nothing_to_say_about_the_name(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    logger = transformers_logging.get_logger("transformers")
    monkeypatch.setattr(type(logger), "warning_once", lambda _, text, *__: said.append(text))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = Decoder.from_pretrained(target_of(model), draft="lookup", tree_nodes=4)
        decoder.generate([PROMPT], max_new_tokens=NEW)
    assert not said
