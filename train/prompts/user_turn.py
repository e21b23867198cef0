"""Where a chat template puts the user's message: the tokens before it, and what ends it."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.train.data.row_forms import Message
from drafthead.train.data.supervision import render, special_ids

MARKER = "qzmessagezq"  # stands for the message; no template writes it


@dataclass(frozen=True)
class UserTurn:
    """What a model reads before it writes the user's message itself, and how it ends that.

    For "<|user|>\\n...<|end|>\\n<|assistant|>\\n" the prefix is "<|user|>\\n" and the end is the
    token <|end|>. For "USER: ... ASSISTANT:" without control tokens the prefix is "USER:" and the
    end is the string "ASSISTANT:".
    """

    prefix: list[int]  # token ids
    end_ids: frozenset[int] = frozenset()  # none or one
    end_text: str | None = None  # where the template has no control token after the message


def user_turn(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> UserTurn:
    """The turn of a conversation's first user message, after a system message if one is given.

    Without `system` the prefix holds the system message that the template writes by itself, if
    any. Raises UserError if the template refuses the roles, or if it does not show the message and
    something after it, as for a base model, which has none.
    """
    messages: list[Message] = [{"role": "user", "content": MARKER}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = render(tokenizer, messages, "the user's turn", add_generation_prompt=True)
    before, found, after = text.rpartition(MARKER)
    if not found or not after.strip():
        raise UserError(
            "the chat template does not show where a user's message begins and ends, so the target "
            "cannot write one: use another target"
        )
    # A space before a word belongs to the word's token, so the model must write it itself.
    prefix = token_ids(tokenizer, before.rstrip(" "))
    controls = special_ids(tokenizer)
    ends = [token for token in token_ids(tokenizer, after) if token in controls]
    return UserTurn(prefix, frozenset(ends[:1]), None if ends else after.strip())


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text that names its control tokens itself."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
