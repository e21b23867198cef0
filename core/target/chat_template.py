"""Chat templates: the one that a base model lacks, and the arguments that a template reads.

The conversations of a base model are texts that answers continue. Arguments are such as `tools` and
`enable_thinking`.
"""

import logging
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError

logger = logging.getLogger(__name__)

TemplateArguments: TypeAlias = Mapping[str, Any]
NO_ARGUMENTS: TemplateArguments = MappingProxyType({})

# Every answer ends the text, and what follows goes on from all before it.
CONTINUATION = (
    "{{ beginning }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
# What those who render pass themselves; `tools` and `documents` are the user's as any other.
RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {
    "tools",
    "documents",
    "kwargs",
}


def reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the tokenizer's chat template, or what a base model has for one, names a variable."""
    return _names(str(tokenizer.chat_template or CONTINUATION), name)


def names_role(tokenizer: PreTrainedTokenizerBase, role: str) -> bool:
    """Whether the tokenizer's chat template has a case for the messages of a role."""
    return re.search(rf"""(['"]){re.escape(role)}\1""", str(tokenizer.chat_template)) is not None


@lru_cache(maxsize=4096)
def _names(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def check_template_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: TemplateArguments
) -> None:
    """Raise UserError for an argument that the tokenizer's chat template does not read."""
    name = Path(tokenizer.name_or_path).name or "this tokenizer"  # clients may not see folders
    for argument in arguments:
        if not tokenizer.chat_template:
            raise UserError(
                f"{name} has no chat template, so the template argument {argument} has no meaning"
            )
        if argument in RESERVED:
            raise UserError(
                f"{argument} is set by drafthead when it renders prompts: leave "
                "this template argument out"
            )
        if not reads(tokenizer, argument):
            if argument == "tools":
                raise UserError(
                    f"the chat template of {name} has no place for tools: leave them out and ask "
                    "for JSON (response_format), or use a model that calls tools"
                )
            raise UserError(
                f"the chat template of {name} does not read {argument}: correct the name of this "
                "template argument, or leave it out"
            )


@cache
def tell_of_base_model(name: str) -> None:
    """Say, once for each tokenizer, how its prompts are read."""
    logger.warning("%s has no chat template: prompts are texts that answers continue", name)


def template_options(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The arguments of `apply_chat_template` besides the messages: none for a template."""
    if tokenizer.chat_template:
        return {}
    tell_of_base_model(tokenizer.name_or_path or "this tokenizer")
    first = tokenizer("a")["input_ids"][0]  # as a text begins that is a prompt by itself
    beginning = tokenizer.bos_token if first == tokenizer.bos_token_id else ""
    return {"chat_template": CONTINUATION, "beginning": beginning}
