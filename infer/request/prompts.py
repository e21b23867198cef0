"""From users' prompts to token ids."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.target.chat_template import (
    NO_ARGUMENTS,
    TemplateArguments,
    check_template_arguments,
    template_options,
)
from drafthead.infer.request.integers import ARRAYS, integer
from drafthead.infer.request.messages import rendered
from drafthead.infer.request.padding import PadToken, masked, without_padding
from drafthead.infer.request.token_rows import is_list, rows_of, token_rows, type_of

Prompt: TypeAlias = (
    str
    | Sequence[Mapping[str, Any]]  # the messages of a chat
    | Sequence[int]  # token ids, as they are
    | torch.Tensor  # token ids [T]; a tensor or array [B, T] is a batch
    | np.ndarray
    | Mapping[str, Any]  # a tokenizer's output
)
ACCEPTED = (
    "a prompt is a string, a list of chat messages, token ids (list, tensor or array) or a "
    "tokenizer's output with input_ids, and a batch is a list of prompts or token ids [B, T]"
)
# What tokenizers return; nothing but ids and mask is read, as for prompts that are strings.
TOKENIZER_KEYS = {
    "attention_mask", "input_ids", "length", "offset_mapping", "special_tokens_mask",
    "token_type_ids",
}  # fmt: skip
IMAGE_MARKS = "mm_token_type_ids"  # of processors: 0 at each token of a text


def encode(
    prompts: Prompt | Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    attention_mask: object = None,
    pad: PadToken | None = None,
    template_arguments: TemplateArguments = NO_ARGUMENTS,
    *,
    continue_final_message: bool | None = None,
) -> list[list[int]]:
    """Each prompt as token ids, without padding.

    A string is one user message when the tokenizer has a chat template, and plain text otherwise.
    Token ids in lists are taken as they are. In tensors, arrays and a tokenizer's output
    `attention_mask` marks padding with 0; without a mask it is the tokens `pad` at the beginning
    and end of rows, as in transformers. `template_arguments` are the chat template's. Raises
    UserError for anything else, for an empty prompt, for text without a tokenizer, and for template
    arguments that have no effect.
    """
    source = prompts if attention_mask is None else with_mask(prompts, attention_mask)
    reader = PromptReader(tokenizer, pad, template_arguments, continue_final_message)
    encoded = reader.read(source)
    if not encoded:
        raise UserError("there is no prompt to decode")
    for number, ids in enumerate(encoded):
        if not ids:
            raise UserError(f"prompt {number} is empty: it needs at least one token")
    return encoded


def with_mask(prompts: object, attention_mask: object) -> dict[str, Any]:
    """Token ids and their mask in the form of a tokenizer's output."""
    output = dict(prompts) if isinstance(prompts, Mapping) else {"input_ids": prompts}
    if "attention_mask" in output:
        raise UserError("attention_mask is given twice: as an option and with the prompts")
    return output | {"attention_mask": attention_mask}


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts of every form as token ids."""

    tokenizer: PreTrainedTokenizerBase | None
    pad: PadToken | None
    template_arguments: TemplateArguments
    continue_final_message: bool | None

    def read(self, prompts: Any) -> list[list[int]]:
        """The token ids of one prompt, or of each prompt of a batch."""
        if not is_list(prompts) or is_chat(prompts) or is_token_ids(prompts):
            return self.rows(prompts, "the prompt")
        batch = [self.rows(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
        for number, rows in enumerate(batch):
            if len(rows) != 1:
                raise UserError(f"prompt {number} of a list is itself a batch of {len(rows)}")
        return [rows[0] for rows in batch]

    def rows(self, prompt: Any, name: str) -> list[list[int]]:
        """The token ids of one prompt, or of the rows of ids [B, T]."""
        arguments, goes_on = self.template_arguments, self.continue_final_message
        if is_chat(prompt):
            return [encode_one(prompt, self.tokenizer, arguments, continue_final_message=goes_on)]
        if goes_on is not None:
            raise UserError(f"continue_final_message is for messages, and {name} has none")
        if isinstance(prompt, str):
            return [encode_one(prompt, self.tokenizer, arguments)]
        if arguments:
            raise UserError(
                f"chat_template_kwargs are for prompts that are texts or messages, and {name} has "
                f"the type {kind_of(prompt)}: leave them out"
            )
        if is_list(prompt) and (len(prompt) == 0 or is_token_ids(prompt)):
            return token_rows(prompt, name)
        if isinstance(prompt, ARRAYS) and prompt.ndim in (1, 2):
            return without_padding(token_rows(prompt, name), self.pad)
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            return self.tokenized(prompt, name)
        raise UserError(f"{name} has the type {kind_of(prompt)}: {ACCEPTED}")

    def tokenized(self, output: Mapping[str, Any], name: str) -> list[list[int]]:
        """The token ids of a tokenizer's output, without padding."""
        if others := other_inputs(output, TOKENIZER_KEYS):
            raise UserError(f"{name} holds {others[0]}, which is not supported here")
        rows, mask = token_rows(output["input_ids"], name), output.get("attention_mask")
        if mask is None:
            return without_padding(rows, self.pad)
        return masked(rows, rows_of(mask, "attention_mask"))


def other_inputs(inputs: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The names of inputs of a model that hold something and are not among the known ones."""
    return sorted(name for name in inputs.keys() - known if holds_something(inputs[name], name))


def holds_something(value: object, name: str = "") -> bool:
    """Whether an input is one: not None, and no collection or tensor without elements.

    transformers gives image-text models such inputs, and processors return them, where the user has
    given no image. Marks of images that are all 0 are none.
    """
    if isinstance(value, Mapping):
        return any(map(holds_something, value.values()))
    if isinstance(value, list | tuple) and name != IMAGE_MARKS:
        return any(map(holds_something, value))
    if name == IMAGE_MARKS and value is not None:
        return any(any(row) for row in rows_of(value, name))
    return value is not None and 0 not in getattr(value, "shape", ())


def kind_of(value: object) -> str:
    """What a value is that is no prompt: its type, and the keys of a mapping."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {sorted(map(str, value))}"
    return type_of(value)


def is_chat(prompt: object) -> bool:
    """Whether this is a list of chat messages; raises UserError if only the first is one."""
    if not is_list(prompt) or not prompt:
        return False
    messages = [isinstance(message, Mapping) and "role" in message for message in prompt]
    if messages[0] and not all(messages):
        wrong = prompt[messages.index(False)]
        raise UserError(
            f"chat messages are mappings with a role, but one has the type {kind_of(wrong)}"
        )
    return messages[0]


def is_token_ids(prompt: object) -> bool:
    """Whether this is a list that begins with a token id."""
    return is_list(prompt) and len(prompt) > 0 and integer(prompt[0]) is not None


def encode_one(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    template_arguments: TemplateArguments = NO_ARGUMENTS,
    *,
    continue_final_message: bool | None = None,
) -> list[int]:
    """A string or chat messages as token ids; see `encode`."""
    if tokenizer is None:
        raise UserError(
            "the target has no tokenizer: pass prompts as token ids, or tokenizer= to "
            "Decoder.from_pretrained"
        )
    check_template_arguments(tokenizer, template_arguments)
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return list(tokenizer(prompt)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    options = {**template_options(tokenizer), **template_arguments}
    text = rendered(prompt, tokenizer, options, continue_final_message)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def refuse_unknown_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise UserError for a token id outside the target's vocabulary."""
    for number, ids in enumerate(prompts):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"prompt {number} holds token id {token}, but the target's vocabulary ends at "
                    f"{vocab_size - 1}"
                )
