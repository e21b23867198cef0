"""From a user's prompts and checked options to a request in token ids."""

import sys
from dataclasses import replace
from typing import Any

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer.engine.logits_processing import processors_for
from drafthead.infer.request.generation_config import refuse_other_start, with_own_settings
from drafthead.infer.request.options import Options, Request
from drafthead.infer.request.prompts import encode, pad_token_of, refuse_unknown_tokens
from drafthead.infer.request.stopping import stops_for


def request_of(
    target: Target,
    prompts: Any,
    options: Options,
    end_ids: frozenset[int],
    draft_temperature: float | None = None,
) -> Request:
    """The request in token ids and limits; raises UserError for what cannot be decoded.

    `prompts` is what `Decoder.generate` takes first; `end_ids` are the target's own.
    """
    texts = encode(
        options.prompts_of(prompts),
        target.tokenizer,
        options.attention_mask,
        pad_token_of(target),
        options.template_arguments,
        continue_final_message=options.continue_final_message,
    )
    texts = [text for text in texts for _ in range(options.num_return_sequences)]
    refuse_unknown_tokens(texts, target.vocab_size)
    refuse_other_start(options.config, target.decoder_prompt)
    ids = [target.as_prompt(text) for text in texts]
    prefixes = [target.answer_prefix(prompt) for prompt in ids]
    limits = options.limits_of(prefixes, target.context)
    ends = end_ids if options.own_ends is None else options.own_ends
    custom, criteria, config = options.logits_processor, options.stopping_criteria, options.config
    if options.use_model_defaults:
        own = getattr(target.model, "generation_config", None)
        config = with_own_settings(config, own, target.model.name_or_path or "the model")
    return Request(
        **vars(options),
        prompts=ids,
        limits=limits,
        seeds=options.seeds_of(len(ids)),
        end_ids=ends,
        processors=processors_for(target, config, custom, prefixes, limits, ends),
        stops=stops_for(options.stop_strings, criteria, target.tokenizer, prefixes),
        draft_temperature=draft_temperature,
        prefixes=prefixes,
    )


def single(request: Request) -> Request:
    """The request; raises UserError when it has several prompts."""
    if len(request.prompts) > 1:
        raise UserError(f"a request has one prompt, got {len(request.prompts)}")
    return request


def endless_request(target: Target, options: Options, rows: int, length: int) -> Request:
    """A request of random prompts of `length` tokens or fewer, whose answers do not end by a token.

    For timing: they say everything twice, so that lookup has something to find.
    """
    length = min(length, (target.max_length or sys.maxsize) // 2)
    half = -(-length // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (rows, half), generator=generator)
    prompts = ids.repeat(1, 2)[:, :length]
    # What is of prompts that are texts or messages has no meaning for these.
    options = replace(options, template_arguments={}, continue_final_message=None)
    options = replace(options, attention_mask=torch.ones_like(prompts))
    return replace(request_of(target, prompts, options, frozenset()), end_ids=frozenset(), stops=())
