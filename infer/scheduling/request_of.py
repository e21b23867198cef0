"""From a user's prompts and checked options to a request in token ids."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from drafthead.core.errors import UserError
from drafthead.core.target.context import Context
from drafthead.core.target.target import Target
from drafthead.infer.answers.score_record import LogprobRecord
from drafthead.infer.request.generation_config import refuse_other_start, with_own_settings
from drafthead.infer.request.processors import processors_for
from drafthead.infer.request.prompts import encode, pad_token_of, refuse_unknown_tokens
from drafthead.infer.request.request import DecodeOptions, Request
from drafthead.infer.request.stopping import stops_for


def request_of(
    target: Target,
    prompts: Any,
    options: DecodeOptions,
    end_ids: frozenset[int],
    draft_temperature: float | None = None,
) -> Request:
    """The request in token ids and limits; raises UserError for what cannot be decoded.

    `prompts` is what `Decoder.generate` takes first; `end_ids` are the target's own.
    """
    texts = encode(
        prompts_of(options, prompts),
        target.tokenizer,
        options.attention_mask,
        pad_token_of(target),
        options.chat_template_kwargs,
        continue_final_message=options.continue_final_message,
    )
    texts = [text for text in texts for _ in range(options.num_return_sequences)]
    refuse_unknown_tokens(texts, target.vocab_size)
    refuse_other_start(options.generation_config, target.decoder_prompt)
    ids = [target.as_prompt(text) for text in texts]
    prefixes = [target.answer_prefix(prompt) for prompt in ids]
    limits = limits_of(options, prefixes, target.context)
    ends = end_ids if options.eos_token_id is None else options.eos_token_id
    custom, criteria, config = (
        options.logits_processor,
        options.stopping_criteria,
        options.generation_config,
    )
    if options.use_model_defaults:
        own = getattr(target.model, "generation_config", None)
        config = with_own_settings(config, own, target.model.name_or_path or "the model")
    top = options.logprobs
    return Request(
        **vars(options),
        prompts=ids,
        limits=limits,
        seeds=seeds_of(options, len(ids)),
        end_ids=ends,
        processors=processors_for(target, config, custom, prefixes, limits, ends),
        stops=stops_for(options.stop_strings, criteria, target.tokenizer, prefixes),
        draft_temperature=draft_temperature,
        new_record=None if top is None else partial(LogprobRecord, top),
        prefixes=prefixes,
    )


def prompts_of(options: DecodeOptions, first: Any) -> Any:
    """The prompts, which came as the first argument or by name.

    Raises UserError for none, and for both.
    """
    if first is None and not options.tokenized:
        raise UserError("there is no prompt to decode: pass it as the first argument")
    if first is not None and options.tokenized:
        raise UserError("prompts are given twice: as the first argument and by name")
    return options.tokenized if first is None else first


def seeds_of(options: DecodeOptions, rows: int) -> list[int]:
    """One seed for each answer; raises UserError when another number of seeds was given."""
    if isinstance(options.seed, int):
        return [options.seed + row for row in range(rows)]
    if len(options.seed) != rows:
        raise UserError(f"{rows} answers need {rows} seeds or one, got {len(options.seed)}")
    return list(options.seed)


def limits_of(
    options: DecodeOptions, prompts: Sequence[Sequence[int]], context: Context
) -> list[int]:
    """Most new tokens for each prompt, in the context of a target.

    Raises UserError for a prompt that leaves no room for an answer, see also `Context.room`.
    """
    limits = [limit_of(options, len(prompt)) for prompt in prompts]
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if limit < 1:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, but max_length is "
                f"{options.max_length}: set max_new_tokens instead"
            )
    pairs = enumerate(zip(prompts, limits, strict=True))
    return [context.room(f"prompt {n}", len(prompt), limit) for n, (prompt, limit) in pairs]


def limit_of(options: DecodeOptions, prompt_length: int) -> int:
    """Most new tokens in a context without end; below 1 when max_length leaves no room."""
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    assert options.max_length is not None
    return options.max_length - prompt_length


def single(request: Request) -> Request:
    """The request; raises UserError when it has several prompts."""
    if len(request.prompts) > 1:
        raise UserError(f"a request has one prompt, got {len(request.prompts)}")
    return request


def endless_request(target: Target, options: DecodeOptions, rows: int, length: int) -> Request:
    """A request of random prompts of `length` tokens or fewer, whose answers do not end by a token.

    For timing: they say everything twice, so that lookup has something to find.
    """
    length = min(length, (target.max_length or sys.maxsize) // 2)
    half = -(-length // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (rows, half), generator=generator)
    prompts = ids.repeat(1, 2)[:, :length]
    # What is of prompts that are texts or messages has no meaning for these.
    options = replace(options, chat_template_kwargs={}, continue_final_message=None)
    options = replace(options, attention_mask=torch.ones_like(prompts))
    return replace(request_of(target, prompts, options, frozenset()), end_ids=frozenset(), stops=())
