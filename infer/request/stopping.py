"""Where an answer ends: end tokens, stop strings and transformers' stopping criteria.

Strings and criteria are asked on the host after every committed token, in order, as plain decoding
would ask them. What a longer step has committed after the end is dropped.
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
from drafthead.heads.target.target import Target

Stop: TypeAlias = Callable[[Sequence[int]], bool]  # whether an answer ends with its last token


def end_token_ids(target: Target) -> frozenset[int]:
    """The tokens that end an answer of the target, the same as for `model.generate`."""
    ends = target.model.generation_config.eos_token_id if target.model.generation_config else None
    if ends is None:
        ends = target.config.eos_token_id
    return frozenset() if ends is None else token_ids(ends)


def token_ids(ids: int | Sequence[int]) -> frozenset[int]:
    """One token id or several, the two forms of transformers' `eos_token_id`."""
    return frozenset([ids] if isinstance(ids, int) else ids)


def stops_for(
    stop_strings: Sequence[str],
    custom: Sequence[StoppingCriteria],
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[Sequence[int]],
) -> list[Stop]:
    """When the answer to each prompt stops; an empty list when nothing was asked for.

    A stop string ends the answer with the token that completes it. As in transformers that token
    is kept whole, with any text after the string. Raises UserError for stop strings that the
    target's tokenizer cannot produce.
    """
    if not stop_strings and not custom:
        return []
    strings = string_criteria(stop_strings, tokenizer) if stop_strings else None
    return [stop_after(prompt, StoppingCriteriaList(custom), strings) for prompt in prompts]


def string_criteria(
    stop_strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria:
    """transformers' criteria for stop strings; raises UserError where there can be none."""
    if tokenizer is None:
        raise UserError("stop_strings need a tokenizer, and the target has none")
    try:
        return StopStringCriteria(tokenizer, list(stop_strings))
    except ValueError as error:
        raise UserError(f"stop_strings {list(stop_strings)}: {error}") from error


def stop_after(
    prompt: Sequence[int], custom: StoppingCriteriaList, strings: StopStringCriteria | None
) -> Stop:
    """The criteria for the answer to one prompt; they get ids [1, T] and no scores."""
    prompt_ids = torch.tensor(prompt)  # [T] made once: prompts can be long

    def stop(answer: Sequence[int]) -> bool:
        stopped = False
        if custom:
            ids = torch.cat([prompt_ids, torch.tensor(answer)])
            stopped = bool(custom(ids[None], None).all())
        if strings is not None and not stopped:
            recent = last_tokens(prompt, answer, strings.maximum_token_len)
            stopped = bool(strings(torch.tensor([recent]), None).all())
        return stopped

    return stop


def last_tokens(prompt: Sequence[int], answer: Sequence[int], count: int) -> list[int]:
    """The last `count` tokens of prompt and answer together, or all if there are fewer.

    It copies no more than these: of prompt 1 2 3 and answer 4 the last two are 3 4.
    """
    missing = count - len(answer)
    return [*prompt[-missing:], *answer] if missing > 0 else list(answer[-count:])
