"""Ends of answers: end tokens, stop strings and transformers' stopping criteria.

Strings and criteria are asked on the host after every committed token, in order, as plain decoding
would ask them. What a longer step has committed after the end is dropped.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from transformers.generation.stopping_criteria import (
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError

# Why an answer has ended: by one of the target's end tokens, a stop string or one of the caller's
# stopping criteria; at its limit of tokens or of time; or because its stream was closed.
FinishReason = Literal[
    "end_token", "stop_string", "stopping_criteria", "length", "time", "cancelled"
]


def token_ids(ids: int | Sequence[int]) -> frozenset[int]:
    """One token id or several, the two forms of transformers' `eos_token_id`."""
    return frozenset([ids] if isinstance(ids, int) else ids)


def stops_for(
    stop_strings: Sequence[str],
    custom: Sequence[StoppingCriteria],
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[Sequence[int]],
) -> list["Stop"]:
    """The stop of the answer to each prompt; an empty list when nothing was asked for.

    A stop string ends the answer with the token that completes it. As in transformers that token
    is kept whole, with any text after the string. Raises UserError for stop strings that the
    target's tokenizer cannot produce.
    """
    criteria = [*custom, *([string_criteria(stop_strings, tokenizer)] if stop_strings else [])]
    return [Stop(prompt, criteria) for prompt in prompts] if criteria else []


def string_criteria(
    stop_strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria:
    """transformers' criteria for stop strings; raises UserError where there can be none."""
    if tokenizer is None:
        raise UserError("stop_strings need a tokenizer, and the target has none")
    try:
        return known_criteria(tokenizer, len(tokenizer), tuple(stop_strings))
    except ValueError as error:
        raise UserError(f"stop_strings {list(stop_strings)}: {error}") from error


@lru_cache(8)
def known_criteria(
    tokenizer: PreTrainedTokenizerBase, size: int, stop_strings: tuple[str, ...]
) -> StopStringCriteria:
    """transformers' criteria, which take half a second for 50,000 tokens and remember nothing.

    `size` is the tokenizer's: tokens may have been added to it.
    """
    return StopStringCriteria(tokenizer, list(stop_strings))


class Stop:
    """Stop strings and the caller's criteria for the answer to one prompt, token by token.

    What a token costs depends on the length of the text only where a criterion reads all of it. A
    criterion with a number `every` is asked at texts of a multiple of so many tokens alone.
    """

    def __init__(self, prompt: Sequence[int], criteria: Sequence[StoppingCriteria]):
        self.strings = [each for each in criteria if isinstance(each, StopStringCriteria)]
        others = [each for each in criteria if not isinstance(each, StopStringCriteria)]
        self.others = others
        longest = max([each.maximum_token_len for each in self.strings], default=0)
        self.recent = deque(prompt[-longest:] if longest else (), maxlen=longest)
        self.text = GrowingText(prompt if others else ())

    def __call__(self, token: int) -> FinishReason | None:
        """The reason to end with this token, which follows those given before; None: it goes on.

        The criteria get ids [1, T] and no scores.
        """
        if self.others:
            self.text.add(token)
            due = [e for e in self.others if self.text.length % getattr(e, "every", 1) == 0]
            if due and bool(StoppingCriteriaList(due)(self.text.ids()[None], None).all()):
                return "stopping_criteria"
        self.recent.append(token)
        if not self.strings:
            return None
        recent = torch.tensor([list(self.recent)])
        return "stop_string" if any(bool(each(recent, None)) for each in self.strings) else None


class GrowingText:
    """Token ids of a text as a tensor that grows, without being copied each time."""

    def __init__(self, tokens: Sequence[int]):
        self.length = len(tokens)
        self.store = torch.tensor(tokens, dtype=torch.long)  # [capacity]
        self.added: list[int] = []  # the last ones, which are not in the store yet

    def add(self, token: int) -> None:
        """One more token at the end."""
        self.added.append(token)
        self.length += 1

    def ids(self) -> torch.Tensor:
        """The ids [T]; what was returned before stays as it is."""
        if self.length > len(self.store):
            self.store = torch.cat([self.store, self.store.new_empty(max(64, self.length))])
        if self.added:
            first = self.length - len(self.added)
            self.store[first : self.length] = torch.tensor(self.added)
            self.added = []
        return self.store[: self.length]
