"""Adapters by name that add tokens: the tables of their base model grow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_answers import generated
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import VOCAB, tiny_llama
from transformers import AutoModelForCausalLM

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.infer import Decoder

ADDED = [VOCAB, VOCAB + 1]
PROMPT = [9, 10, 11, *ADDED, 12]
KINDS: dict[str, dict[str, Any]] = {
    "whole tables": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "factors of tables": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "rows of tables": {"trainable_token_indices": {"embed_tokens": ADDED}},
    "tables as they were": {},
}


def adapted(folder: Path, tied: bool = False, **settings: Any) -> PeftModel:
    """A base model in a folder, and an adapter for it with two more tokens."""
    tiny_llama(tie_word_embeddings=tied).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    model.resize_token_embeddings(VOCAB + 2)
    settings = {"target_modules": ["q_proj"], **settings}
    wrapped = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))
    for parameter in wrapped.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    return wrapped.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapters_folder_may_add_tokens(kind, tmp_path) -> None:
    wrapped = adapted(tmp_path / "base", **KINDS[kind])
    wrapped.save_pretrained(tmp_path / "adapter")
    target = load_decoder_only(tmp_path / "adapter", dtype="float32", device="cpu")
    assert target.vocab_size == VOCAB + 2
    answer = Decoder(target).generate(PROMPT, max_new_tokens=12).sequences[0]
    assert answer == generated(wrapped, PROMPT, 12)


def test_rows_of_tied_tables_are_enough(tmp_path) -> None:
    wrapped = adapted(tmp_path / "base", tied=True, **KINDS["rows of tables"])
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    target = load_decoder_only(tmp_path / "adapter", dtype="float32", device="cpu")
    answer = Decoder(target).generate(PROMPT, max_new_tokens=12).sequences[0]
    assert answer == generated(wrapped, PROMPT, 12)


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_an_adapter_without_a_base_model_is_refused(tmp_path, text) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match="adapter_config.json"):
        load_decoder_only(tmp_path)


def test_tokens_without_rows_of_the_output_head_are_refused(tmp_path) -> None:
    wrapped = adapted(tmp_path / "base", **KINDS["rows of tables"])
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(UserError, match="adds tokens 64 to 65, but holds no rows of lm_head"):
        load_decoder_only(tmp_path / "adapter", dtype="float32", device="cpu")
