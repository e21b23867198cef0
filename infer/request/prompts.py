"""From users' prompts to token ids, and from token ids back to text, piece by piece."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from tokenizers.decoders import DecodeStream
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]] | torch.Tensor


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompts` is one prompt: a string, ids (a tensor [T] too), or one chat's messages."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, torch.Tensor):
        return prompts.ndim == 1
    return len(prompts) > 0 and isinstance(prompts[0], int | Mapping)


def encode(
    prompts: Prompt | Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None
) -> list[list[int]]:
    """Each prompt as token ids.

    A string is one user message when the tokenizer has a chat template, and plain text otherwise.
    Ids, in lists or tensors [T], are taken as they are. Raises UserError for an empty prompt, or
    for text without a tokenizer.
    """
    many = [prompts] if is_single(prompts) else list(prompts)
    if not many:
        raise UserError("there is no prompt to decode")
    encoded = [encode_one(prompt, tokenizer) for prompt in many]  # type: ignore[arg-type]
    for number, ids in enumerate(encoded):
        if not ids:
            raise UserError(f"prompt {number} is empty: it needs at least one token")
    return encoded


def refuse_unknown_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise UserError for a token id outside the target's vocabulary."""
    for number, ids in enumerate(prompts):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"prompt {number} holds token id {token}, but the target's vocabulary ends at "
                    f"{vocab_size - 1}"
                )


def encode_one(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """One prompt as token ids; see `encode`."""
    if isinstance(prompt, torch.Tensor):
        return [int(token) for token in prompt.tolist()]
    if not isinstance(prompt, str) and (len(prompt) == 0 or isinstance(prompt[0], int)):
        return [int(token) for token in prompt]  # type: ignore[arg-type]
    if tokenizer is None:
        raise UserError("the target has no tokenizer: pass prompts as token ids")
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return list(tokenizer(prompt)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template: pass a string or token ids")
    messages = [dict(message) for message in prompt]  # type: ignore[arg-type]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def text_pieces(
    tokens: Iterator[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Text as soon as its tokens are there, never half a character, without special tokens.

    Raises UserError, when the first piece is asked for, for a tokenizer implemented in Python.
    """
    if not tokenizer.is_fast:
        raise UserError("streaming needs a fast tokenizer; this one is implemented in Python")
    stream = DecodeStream(skip_special_tokens=True)
    for committed in tokens:
        # The stream returns None until the bytes of a character are complete.
        pieces = [stream.step(tokenizer.backend_tokenizer, token) for token in committed]
        if piece := "".join(p for p in pieces if p):
            yield piece
