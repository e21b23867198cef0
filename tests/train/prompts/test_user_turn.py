"""The user's turn of real chat templates: what a model reads before it, and what ends it."""

import pytest
from tiny import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from drafthead.core.errors import UserError
from drafthead.train.prompts.message_source import user_turn

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<s>[INST] ' + message['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'USER: ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GEMMA = (
    "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n'"
    " + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CONTROLS = ("<|im_start|>", "<|im_end|>", "<s>", "<start_of_turn>", "<end_of_turn>")


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROLS)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "system", "prefix", "end"),
    [
        (CHATML, None, "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        (CHATML, "Ask", "<|im_start|>system\nAsk<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        # The space belongs to the message's first word.
        (LLAMA_2, None, "<s>[INST]", "[/INST]"),
        (VICUNA, None, "USER:", "ASSISTANT:"),
        (GEMMA, None, "<s><start_of_turn>user\n", "<end_of_turn>"),
    ],
    ids=["chatml", "chatml, system", "llama 2", "vicuna", "gemma"],
)
def test_the_turn_of_a_template(template, system, prefix, end) -> None:
    tokenizer = tokenizer_with(template)
    turn = user_turn(tokenizer, system)
    assert tokenizer.decode(turn.prefix) == prefix
    ends = [tokenizer.decode([token]) for token in turn.end_ids]
    assert (ends, turn.end_text) == (([end], None) if end in CONTROLS else ([], end))


@pytest.mark.parametrize(
    ("template", "system", "problem"),
    [
        (None, None, "does not show where a user's message begins"),
        (GEMMA, "Ask", "refuses the roles system, user"),
        ("{{ messages[0]['content'] }}", None, "does not show where a user's message begins"),
        ("{{ 'nothing' }}", None, "does not show where a user's message begins"),
    ],
    ids=["none", "no system role", "no end", "no message"],
)
def test_a_template_without_a_users_turn_is_refused(template, system, problem) -> None:
    with pytest.raises(UserError, match=problem):
        user_turn(tokenizer_with(template), system)
