"""The options of one call of `Decoder.generate`, `stream` or `steps`, and the request they make.

`DecodeOptions` documents the keywords. `read_options` checks them once, together with the call's
`GenerationConfig`; the result goes with the prompts, as a `Request`, to every step.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.chat_template import TemplateArguments
from drafthead.infer.request.generation_config import (
    CONFIG_CHECKS,
    Check,
    checked,
    given_options,
    sampling_from,
)
from drafthead.infer.request.other_words import refuse_unknown_options
from drafthead.infer.request.request import BeamOptions, EarlyStopping, Options
from drafthead.infer.request.values import (
    ARRAYS,
    integer,
    integer_option,
    is_list,
    whole_option,
)

DEFAULT_MAX_NEW_TOKENS = 128
TOKENIZED = ("input_ids", "token_type_ids", "mm_token_type_ids")  # of a tokenizer's output
RULE_OPTIONS = (
    "typical_epsilon", "typical_delta", "lenience", "accept_top", "accept_distance", "min_block",
)  # fmt: skip
# These are about one call with a known number of prompts: `serve` and `chat` do not take them.
OF_ONE_CALL = {
    *TOKENIZED, "attention_mask", "continue_final_message", "num_return_sequences", "num_beams",
    "length_penalty", "early_stopping", "max_time", "streamer", "logprobs",
}  # fmt: skip
# What a call of beam search cannot have, in its options or in its config.
NOT_WITH_BEAMS = ("max_time", "stop_strings", "stopping_criteria", "streamer", "logprobs")


class DecodeOptions(TypedDict, total=False):
    """What `Decoder.generate`, `stream` and `steps` take as keywords after the prompts.

    Without any of them decoding is greedy, of up to 128 tokens, and nothing is filtered. Keywords
    win over `generation_config`. Where None is allowed, it is the same as leaving the option out,
    except for `seed`. Integers may be NumPy's, or tensors without dimensions.
    """

    # Most new tokens of each answer. The end of the target's context may cut it sooner.
    max_new_tokens: int | None
    # 0 is greedy; above 0 tokens are sampled.
    temperature: float | None
    # Sample from the k most probable tokens; 0 is off.
    top_k: int | None
    # Sample from the most probable tokens that together have this probability; 1 is off.
    top_p: float | None
    # The acceptance rule. "auto" is a lossless one: `greedy` at temperature 0; above it `match`,
    # or `traversal` with a draft model that is not compiled. Lossy ones are used only by name.
    verifier: str
    # Of the lossy `typical`: a token passes above min(epsilon, delta x exp(-entropy)) of the
    # target. Smaller values accept more; the defaults 0.09 and 0.3 are Medusa's.
    typical_epsilon: float | None
    typical_delta: float | None
    # Of the lossy `lenient`: no token becomes more than 1 / lenience times as probable as it should
    # be, after any prefix. 0.5 by default; 1 is exact.
    lenience: float | None
    # Of the lossy `top_k`: a drafted token stays when it is among so many most probable ones of the
    # target. 2 by default; 1 is `greedy`.
    accept_top: int | None
    # Of the lossy `distance`, for ordinal vocabularies such as pixels, never for text: a drafted
    # token stays when its number is at most so far from the most probable one's. 2 by default.
    accept_distance: int | None
    # Of both: tokens that a step adds at least, whatever the target thinks of them. 1 by default.
    min_block: int | None
    # A row's answer depends on its own seed alone: one seed for each row, or an int from which the
    # rows count upwards. 0 by default; None takes an int from the operating system. Under `match`
    # the drafter and its trees do not matter either; under the other sampling rules the text also
    # depends on the size of the tree, so the planner leaves that as it is at first (tree_nodes).
    seed: int | Sequence[int] | None
    # 1 for tokens, 0 for padding at the beginning or end of a row, in the shape of prompts that are
    # token ids [T] or [B, T]. A tokenizer's output brings its own.
    attention_mask: torch.Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | None
    # Prompts as token ids by the name that tokenizers give them, in place of the first argument:
    # `generate(**tokenizer(...))`. The marks beside them must not be of images.
    input_ids: torch.Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | None
    token_type_ids: object
    mm_token_type_ids: object
    # Whether the answer goes on with the last of the messages (True) or is a turn of its own
    # (False). By default it is a turn, and messages that end with the assistant's are refused.
    continue_final_message: bool | None
    # Answers to each prompt, which follow each other in the result. Above 1 only with sampling, or
    # with beam search: the best ones.
    num_return_sequences: int | None
    # Beam search with up to 8 beams; 1 is off. The answers are those of `model.generate`. Without
    # sampling, verifier, streamer, logprobs, max_time, stop strings and stopping criteria.
    num_beams: int | None
    # Of beam search: an answer's score is divided by its length to this power, by default 1.
    length_penalty: float | None
    # Of beam search: with True a prompt's search ends when there are as many answers as beams; with
    # False, the default, when a beam that ended now would not be better than the worst of them;
    # with "never" when none could become so.
    early_stopping: EarlyStopping | None
    # Seconds after which answers end as they are; looked at after each step.
    max_time: float | None
    # Texts that end an answer; the token that completes one is kept whole.
    stop_strings: str | Sequence[str] | None
    # Of `generate` with one prompt: gets the prompt's tokens and then each new one, as streamers of
    # `model.generate` do.
    streamer: BaseStreamer | None
    # Record the log-probability of each token, and those of the target's so many most probable ones
    # beside it (0: of none). Steps are then not one graph with `compile`, only their passes are.
    logprobs: int | None
    # Whether penalties, n-grams and suppressed tokens that are not given come from the model's own
    # generation_config.json, as in `model.generate`; True by default.
    use_model_defaults: bool
    # Everything else under transformers' names: penalties, n-grams, bad words, forced and
    # suppressed tokens, and also `frequency_penalty` and `presence_penalty`, which transformers
    # lacks. What cannot be honoured raises UserError by name.
    generation_config: GenerationConfig | None
    # Arguments of the chat template for prompts that are texts or messages, as `tools`, `documents`
    # or `enable_thinking` are. What the template does not read is refused.
    chat_template_kwargs: Mapping[str, Any] | None
    # Called after every node of a token tree, as in `model.generate` after every token, so they
    # must be functions of `input_ids` and `scores` alone.
    logits_processor: Sequence[LogitsProcessor]
    # Asked row by row after every token whether the answer ends there.
    stopping_criteria: Sequence[StoppingCriteria]


def read_options(options: DecodeOptions) -> Options:
    """Check the options of a call and join them with its generation config.

    Raises UnknownOptionError, which is a TypeError too, for a name that does not exist, and
    UserError for an option that cannot be honoured or has an impossible value.
    """
    refuse_unknown_options(options, DecodeOptions.__annotations__)
    config = options.get("generation_config") or GenerationConfig()
    if not isinstance(config, GenerationConfig):
        raise UserError(
            f"generation_config must be a GenerationConfig of transformers, got {config!r}"
        )
    given = given_options(config)
    if options.get("max_new_tokens") is None and "max_new_tokens" not in given:
        given["max_new_tokens"] = None if "max_length" in given else DEFAULT_MAX_NEW_TOKENS
    named = checked({name: value for name, value in options.items() if value is not None}, CHECKS)
    merged, sampling = given | named, sampling_from(given, named)
    beams = read_beams(merged, sampling)
    answers = merged.get("num_return_sequences", 1)
    if answers > 1 and sampling.greedy and beams is None:
        raise UserError(
            f"num_return_sequences={answers} without sampling would give equal answers: set a "
            "temperature above 0 or num_beams, or leave it out"
        )
    return Options(
        sampling=sampling,
        config=config,
        max_new_tokens=merged["max_new_tokens"],
        max_length=merged.get("max_length"),
        own_ends=merged.get("eos_token_id"),
        stop_strings=merged.get("stop_strings", ()),
        stopping_criteria=merged.get("stopping_criteria", ()),
        logits_processor=merged.get("logits_processor", ()),
        verifier=merged.get("verifier", "auto"),
        rule_options={name: merged[name] for name in RULE_OPTIONS if name in merged},
        seed=merged.get("seed", secrets.randbits(63) if "seed" in options else 0),
        attention_mask=merged.get("attention_mask"),
        tokenized={name: merged[name] for name in TOKENIZED if name in merged},
        continue_final_message=merged.get("continue_final_message"),
        prefill_chunk=merged.get("prefill_chunk_size"),
        num_return_sequences=answers if beams is None else 1,
        max_seconds=merged.get("max_time"),
        top_logprobs=merged.get("logprobs"),
        streamer=merged.get("streamer"),
        beams=beams,
        template_arguments=merged.get("chat_template_kwargs", {}),
        use_model_defaults=merged.get("use_model_defaults") is not False,
    )


def refuse_in_pieces(options: Options) -> None:
    """Raise UserError for options of `generate` where the caller gets tokens in pieces."""
    if options.streamer is not None:
        raise UserError(
            "streamer is an option of generate; stream and steps give pieces themselves"
        )
    if options.beams is not None:
        raise UserError(
            "num_beams is an option of generate alone: no token is sure before the search has ended"
        )


def read_beams(merged: Mapping[str, Any], sampling: SamplingConfig) -> BeamOptions | None:
    """The beams of a call; None without beams.

    Raises UserError for what does not go with beam search, and for its options without beams.
    """
    beams = merged.get("num_beams", 1)
    if beams == 1:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if merged.get(name, neutral) != neutral:
                raise UserError(f"{name}={merged[name]!r} needs num_beams above 1")
        return None
    if not sampling.greedy:
        raise UserError("beams are not sampled: leave out num_beams, or temperature and do_sample")
    if merged.get("verifier", "auto") != "auto":
        raise UserError("num_beams does not go with a verifier: beam search is a rule of its own")
    for name in NOT_WITH_BEAMS:
        # A number is a setting, be it 0; no texts and no criteria are none.
        if (value := merged.get(name)) or isinstance(value, int):
            raise UserError(f"num_beams does not go with {name}: leave one of them out")
    names = ("length_penalty", "early_stopping", "num_return_sequences")
    return BeamOptions(beams, **{name: merged[name] for name in names if name in merged})


def read_template_arguments(name: str, arguments: object) -> TemplateArguments:
    """Arguments of the chat template by name; raises UserError for what is no mapping of names."""
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise UserError(
            f"{name} must be a mapping of names, as {{'enable_thinking': False}}, got {arguments!r}"
        )
    return arguments


def read_seed(name: str, seed: object) -> int | list[int]:
    """One seed or a list of seeds; raises UserError for what is no integer."""
    seeds = seed.tolist() if isinstance(seed, ARRAYS) else seed
    if integer(seeds) is None and is_list(seeds):
        return [integer_option("a seed", each) for each in seeds]
    return integer_option(name, seeds)


# What checks an option's value, given its name and the value where one is given.
CHECKS: Mapping[str, Check] = {
    **CONFIG_CHECKS,
    "logprobs": lambda name, value: whole_option(name, value, least=0),
    **dict.fromkeys(("accept_top", "accept_distance", "min_block"), integer_option),
    "seed": read_seed,
    "chat_template_kwargs": read_template_arguments,
}
