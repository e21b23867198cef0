"""Arguments of a chat template, such as `tools` and `enable_thinking`: which ones it reads."""

import re
from collections.abc import Mapping
from functools import lru_cache
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.target.base_model import CONTINUATION

TemplateArguments: TypeAlias = Mapping[str, Any]
NO_ARGUMENTS: TemplateArguments = MappingProxyType({})

# What those who render pass themselves; `tools` and `documents` are the user's as any other.
RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {
    "tools",
    "documents",
    "kwargs",
}


def reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the tokenizer's chat template, or what a base model has for one, names a variable."""
    return _names(str(tokenizer.chat_template or CONTINUATION), name)


@lru_cache(maxsize=4096)
def _names(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def check_template_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: TemplateArguments
) -> None:
    """Raise UserError for an argument that the tokenizer's chat template does not read."""
    name = tokenizer.name_or_path or "this tokenizer"
    for argument in arguments:
        if not tokenizer.chat_template:
            raise UserError(
                f"{name} has no chat template, so the template argument {argument} has no meaning"
            )
        if argument in RESERVED:
            raise UserError(
                f"{argument} is not the template's: it is set where prompts are rendered; leave "
                "this template argument out"
            )
        if not reads(tokenizer, argument):
            raise UserError(
                f"the chat template of {name} does not read {argument}: correct the name of this "
                "template argument, or leave it out"
            )
