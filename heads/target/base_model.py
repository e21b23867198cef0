"""Conversations of a base model, which has no chat template: texts that answers continue."""

import logging
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

# Every answer ends the text, and what follows goes on from all before it.
CONTINUATION = (
    "{{ beginning }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

logger = logging.getLogger(__name__)


@cache
def tell_of_base_model(name: str) -> None:
    """Say, once for each tokenizer, how its prompts are read."""
    logger.warning("%s has no chat template: prompts are texts that answers continue", name)


def template_options(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What `apply_chat_template` needs besides the messages: nothing where there is a template."""
    if tokenizer.chat_template:
        return {}
    tell_of_base_model(tokenizer.name_or_path or "this tokenizer")
    first = tokenizer("a")["input_ids"][0]  # as a text begins that is a prompt by itself
    beginning = tokenizer.bos_token if first == tokenizer.bos_token_id else ""
    return {"chat_template": CONTINUATION, "beginning": beginning}
