"""A target that writes messages in the user's place, number after number.

Magpie (Xu et al., 2024, arXiv 2406.08464): the model gets the chat template up to the user's turn,
and goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.infer.request.text_pieces import texts_of
from drafthead.train.data.conversations import Conversation, row_seed
from drafthead.train.data.supervision import Rendering, special_ids
from drafthead.train.settings import InventSettings

MARKER = "qzmessagezq"  # stands for the message; no template writes it


@dataclass(frozen=True)
class UserTurn:
    """The text that a model reads before it writes the user's message itself, and its end.

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
    messages: list[dict[str, Any]] = [{"role": "user", "content": MARKER}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = Rendering(tokenizer, "the user's turn").text(messages, add_generation_prompt=True)
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


BEGINNING_TOKENS = 16  # most that are taken from a text


@dataclass(frozen=True)
class InventedMessage:
    """A message that a target wrote in the user's place."""

    number: int
    text: str
    tokens: int  # drawn, the end included
    finished: bool  # it ended within the limit
    has_control_token: bool  # before its end


class MessageSource:
    """Draws messages from a target; each depends on its number and on the settings alone."""

    def __init__(self, decoder: Decoder, settings: InventSettings, texts: Sequence[str] = ()):
        """`texts` lend the messages their beginnings, in turn; a base model needs some.

        Raises UserError for a target without a tokenizer, for one without a chat template if there
        are no texts, and where the template shows no user's turn.
        """
        if decoder.tokenizer is None:
            raise UserError("the target has no tokenizer, so it cannot write messages")
        self.decoder, self.settings = decoder, settings
        self.tokenizer: PreTrainedTokenizerBase = decoder.tokenizer
        self.turn = self._turn(bool(texts))
        self.beginnings = [beginning(self.tokenizer, text) for text in texts] or [[]]
        self.controls = special_ids(self.tokenizer)
        self.ends = decoder.end_ids | self.turn.end_ids

    def _turn(self, has_texts: bool) -> UserTurn:
        """The user's turn; for a base model the beginning of a text."""
        if self.tokenizer.chat_template:
            return user_turn(self.tokenizer, self.settings.system)
        if not has_texts:
            raise UserError(
                f"{self.settings.target} has no chat template, so it has not learnt to write "
                "users' messages: take an instruction-tuned target, or give texts that it "
                "continues, with --beginnings"
            )
        return UserTurn(list(self.tokenizer("")["input_ids"]))

    def batch(self, index: int, count: Callable[[int], None]) -> list[InventedMessage]:
        """The messages of batch `index`: numbers from index times the batch size on.

        `count` is called after each pass of the target with the number of new tokens.
        """
        size = self.settings.batch_size
        numbers = range(index * size, (index + 1) * size)
        beginnings = [self.beginnings[number % len(self.beginnings)] for number in numbers]
        passes = self.decoder.steps(
            [self.turn.prefix + each for each in beginnings],
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            seed=[row_seed(self.settings.seed, f"message {number}", 0) for number in numbers],
            generation_config=GenerationConfig(
                eos_token_id=sorted(self.ends) or None,
                stop_strings=[self.turn.end_text] if self.turn.end_text else None,
            ),
            use_model_defaults=False,  # these are settings for answers
        )
        for emitted in passes:
            count(sum(map(len, emitted.values())))
        answers = passes.result
        rows = zip(numbers, beginnings, answers.sequences, answers.finished, strict=True)
        return [self._message(*row) for row in rows]

    def _message(
        self, number: int, beginning: list[int], drawn: list[int], finished: bool
    ) -> InventedMessage:
        """A message without its end."""
        ids = beginning + (drawn[:-1] if drawn[-1] in self.ends else drawn)
        (text,) = texts_of([ids], self.tokenizer)
        if self.turn.end_text:
            text = text.partition(self.turn.end_text)[0]
        has_control_token = not self.controls.isdisjoint(ids)
        return InventedMessage(number, text.strip(), len(drawn), finished, has_control_token)


def beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The first tokens of a text, and at most half of it."""
    ids = token_ids(tokenizer, text.strip())
    return ids[: min(BEGINNING_TOKENS, len(ids) // 2)]


def first_messages(conversations: Sequence[Conversation]) -> list[str]:
    """The first user's message of each conversation that has one."""
    asked = [[m["content"] for m in c.messages if m["role"] == "user"] for c in conversations]
    return [texts[0] for texts in asked if texts]
