"""Ends of answers that are more than one token: stop strings and transformers' stopping criteria.

They are asked on the host after every committed token, in order, as plain decoding would ask them;
what a longer step has committed behind the end is dropped.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from transformers.generation.stopping_criteria import (
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError

Stop: TypeAlias = Callable[[Sequence[int]], bool]  # whether an answer ends with its last token


def stops_for(
    stop_strings: Sequence[str],
    custom: Sequence[StoppingCriteria],
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[Sequence[int]],
) -> list[Stop]:
    """When the answer to each prompt stops; an empty list when nothing was asked for.

    A stop string ends the answer with the token that completes it, which stays, as in
    transformers: text behind the string in the same token stays too. Raises UserError for stop
    strings that the target's tokenizer cannot say.
    """
    criteria = StoppingCriteriaList(custom)
    if stop_strings:
        if tokenizer is None:
            raise UserError("stop_strings need a tokenizer, and the target has none")
        try:
            criteria.append(StopStringCriteria(tokenizer, list(stop_strings)))
        except ValueError as error:
            raise UserError(f"stop_strings {list(stop_strings)}: {error}") from error
    return [stop_behind(prompt, criteria) for prompt in prompts] if criteria else []


def stop_behind(prompt: Sequence[int], criteria: StoppingCriteriaList) -> Stop:
    """The criteria applied to one row: the prompt and the answer so far, without scores."""

    def stop(answer: Sequence[int]) -> bool:
        ids = torch.tensor([[*prompt, *answer]])
        return bool(criteria(ids, None).all())

    return stop
