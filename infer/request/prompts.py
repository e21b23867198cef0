"""From users' prompts to token ids.

A mask, or the pad token, shows which tokens of padded rows belong to a prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import (
    NO_ARGUMENTS,
    TemplateArguments,
    check_template_arguments,
    template_options,
)
from drafthead.core.target.target import Target
from drafthead.infer.request.messages import rendered
from drafthead.infer.request.values import (
    ARRAYS,
    integer,
    is_list,
    rows_of,
    token_rows,
    type_of,
)

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


@dataclass(frozen=True)
class PadToken:
    """The token that fills rows up, and whether it can also be a part of texts."""

    id: int
    in_texts: bool  # it is the same token as one that begins or ends texts


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
    """A description of a value that is no prompt: its type, and the keys of a mapping."""
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


def pad_token_of(target: Target) -> PadToken | None:
    """The pad token of the target's tokenizer, or of its generation config; None without one."""
    sources = [source for source in (target.tokenizer, target.model.generation_config) if source]
    pads = [pad for source in sources if (pad := source.pad_token_id) is not None]
    if not pads:
        return None
    texts = {source.bos_token_id for source in sources} | target.end_ids
    if target.tokenizer is not None:
        texts.add(target.tokenizer.eos_token_id)
    return PadToken(pads[0], pads[0] in texts)


def masked(rows: Sequence[Sequence[int]], mask: Sequence[Sequence[object]]) -> list[list[int]]:
    """The tokens of each row that its mask keeps: 1 is a token, 0 is padding before or after.

    Raises UserError when the mask has another shape than the rows, or 0 between two tokens.
    """
    if len(mask) != len(rows):
        raise UserError(f"attention_mask has {len(mask)} rows for {len(rows)} prompts")
    return [masked_row(number, *pair) for number, pair in enumerate(zip(rows, mask, strict=True))]


def masked_row(number: int, row: Sequence[int], mask: Sequence[object]) -> list[int]:
    """`masked` for one row.

    Row (0, 0, 5, 6) with mask (0, 0, 1, 1) is the prompt 5 6.
    """
    about = f"row {number} of attention_mask"
    if len(mask) != len(row):
        raise UserError(f"{about} has {len(mask)} entries for {len(row)} tokens")
    if any(entry not in (0, 1) for entry in mask):
        raise UserError(f"{about} must hold nothing but 0 and 1")
    places = [place for place, entry in enumerate(mask) if entry]
    if places and places[-1] - places[0] + 1 != len(places):
        raise UserError(f"{about} has a hole: only tokens at the beginning or end can be masked")
    return [row[place] for place in places]


def without_padding(rows: Sequence[Sequence[int]], pad: PadToken | None) -> list[list[int]]:
    """Rows without the pad tokens at their beginning and end.

    As in transformers, a pad token that also begins or ends texts is taken as text. Raises
    UserError where that is likely to be wrong: rows begin or end with different numbers of it.
    """
    if pad is None:
        return [list(row) for row in rows]
    before = [sum(1 for _ in takewhile(pad.id.__eq__, row)) for row in rows]
    after = [sum(1 for _ in takewhile(pad.id.__eq__, reversed(row))) for row in rows]
    if not pad.in_texts:
        ends = [len(row) - count for row, count in zip(rows, after, strict=True)]
        return [list(row[a:b]) for row, a, b in zip(rows, before, ends, strict=True)]
    if len(set(before)) > 1 or len(set(after)) > 1:
        raise UserError(
            f"token {pad.id} at the ends of the prompts may be padding or text, because it also "
            "begins or ends texts: pass attention_mask"
        )
    return [list(row) for row in rows]
