"""The options of one call of `Decoder.generate`, `stream` or `steps`."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from drafthead.heads.errors import UserError
from drafthead.heads.kv_cache.column_cache import READ_CHUNK
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.chat_template import TemplateArguments
from drafthead.heads.target.context import Context
from drafthead.infer.beams.beam_options import BeamOptions, EarlyStopping, read_beams
from drafthead.infer.request.generation_config import given_options, sampling_from
from drafthead.infer.request.integers import ARRAYS, integer, integer_option
from drafthead.infer.request.other_words import refuse_unknown_options
from drafthead.infer.request.stopping import token_ids
from drafthead.infer.request.token_rows import is_list

DEFAULT_MAX_NEW_TOKENS = 128
SAMPLING_ARGUMENTS = ("temperature", "top_k", "top_p")
TOKENIZED = ("input_ids", "token_type_ids", "mm_token_type_ids")  # of a tokenizer's output
WHOLE_RULE_OPTIONS = ("accept_top", "accept_distance", "min_block")


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


@dataclass(frozen=True)
class DecodeSettings:
    """The options of one call, checked, with defaults and the generation config filled in."""

    config: GenerationConfig  # for the logits processors
    sampling: SamplingConfig
    max_new_tokens: int | None  # None: max_length alone limits the answer
    max_length: int | None  # of prompt and answer together
    end_ids: frozenset[int] | None  # None: the target's own
    stop_strings: tuple[str, ...]
    stopping_criteria: Sequence[StoppingCriteria]
    logits_processor: Sequence[LogitsProcessor]
    verifier: str
    rule_options: Mapping[str, float]  # of the verifier, where they are not the defaults
    seed: int | Sequence[int]  # the first row's seed, or one for each row
    attention_mask: object  # of prompts that are token ids; checked with them
    tokenized: Mapping[str, Any]  # the prompts as a tokenizer's output, if they came by name
    continue_final_message: bool | None
    prefill_chunk: int  # positions of each prompt that one pass reads
    num_return_sequences: int = 1  # of beam search: see `beams`
    max_seconds: float | None = None
    top_logprobs: int | None = None
    streamer: BaseStreamer | None = None
    beams: BeamOptions | None = None  # None: no beam search
    template_arguments: TemplateArguments = field(default_factory=dict)
    use_model_defaults: bool = True

    def prompts(self, first: Any) -> Any:
        """The prompts, which came as the first argument or by name.

        Raises UserError for none, and for both.
        """
        if first is None and not self.tokenized:
            raise UserError("there is no prompt to decode: pass it as the first argument")
        if first is not None and self.tokenized:
            raise UserError("prompts are given twice: as the first argument and by name")
        return self.tokenized if first is None else first

    def seeds(self, rows: int) -> list[int]:
        """One seed for each answer; raises UserError when another number of seeds was given."""
        if isinstance(self.seed, int):
            return [self.seed + row for row in range(rows)]
        if len(self.seed) != rows:
            raise UserError(f"{rows} answers need {rows} seeds or one, got {len(self.seed)}")
        return list(self.seed)

    def limits(self, prompts: Sequence[Sequence[int]], context: Context) -> list[int]:
        """Most new tokens for each prompt, in the context of a target.

        Raises UserError for a prompt that leaves no room for an answer, see also `Context.room`.
        """
        limits = [self.limit(len(prompt)) for prompt in prompts]
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if limit < 1:
                raise UserError(
                    f"prompt {number} has {len(prompt)} tokens, but max_length is "
                    f"{self.max_length}: set max_new_tokens instead"
                )
        pairs = enumerate(zip(prompts, limits, strict=True))
        return [context.room(f"prompt {n}", len(prompt), limit) for n, (prompt, limit) in pairs]

    def limit(self, prompt_length: int) -> int:
        """Most new tokens in a context without end; below 1 when max_length leaves no room."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        assert self.max_length is not None
        return self.max_length - prompt_length


def read_options(options: DecodeOptions) -> DecodeSettings:
    """Check the options of a call and join them with its generation config.

    Raises UnknownOptionError, which is a TypeError too, for a name that does not exist, and
    UserError for an option that cannot be honoured or has an impossible value.
    """
    refuse_unknown_options(options, DecodeOptions.__annotations__)
    config = read_config(options.get("generation_config"))
    given = given_options(config)
    sampling = sampling_from(given, {name: options.get(name) for name in SAMPLING_ARGUMENTS})
    beams = read_beams(options, given, sampling)
    answers = 1 if beams is not None else read_num_return_sequences(options, given, sampling)
    ends = given.get("eos_token_id")
    rule_options = {
        "typical_epsilon": options.get("typical_epsilon"),
        "typical_delta": options.get("typical_delta"),
        "lenience": options.get("lenience"),
        **{name: whole_number(name, options.get(name)) for name in WHOLE_RULE_OPTIONS},
    }
    top_logprobs = options.get("logprobs")
    if top_logprobs is not None:
        top_logprobs = at_least(0, "logprobs", top_logprobs)
    return DecodeSettings(
        config=config,
        sampling=sampling,
        max_new_tokens=read_max_new_tokens(options, given),
        max_length=given.get("max_length"),
        end_ids=None if ends is None else token_ids(ends),
        stop_strings=read_stop_strings(options.get("stop_strings") or given.get("stop_strings")),
        stopping_criteria=options.get("stopping_criteria", ()),
        logits_processor=options.get("logits_processor", ()),
        verifier=options.get("verifier", "auto"),
        rule_options={name: value for name, value in rule_options.items() if value is not None},
        seed=read_seed(options.get("seed", 0)),
        attention_mask=options.get("attention_mask"),
        tokenized=read_tokenized(options),
        continue_final_message=options.get("continue_final_message"),
        prefill_chunk=read_chunk_size(given.get("prefill_chunk_size", READ_CHUNK)),
        num_return_sequences=answers,
        max_seconds=read_max_time(options, given),
        top_logprobs=top_logprobs,
        streamer=options.get("streamer"),
        beams=beams,
        template_arguments=read_template_arguments(options.get("chat_template_kwargs")),
        use_model_defaults=options.get("use_model_defaults") is not False,
    )


def read_template_arguments(arguments: object) -> TemplateArguments:
    """Arguments of the chat template by name; raises UserError for what is no mapping of names."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise UserError(
            "chat_template_kwargs must be a mapping of names, as {'enable_thinking': False}, got "
            f"{arguments!r}"
        )
    return arguments


def read_tokenized(options: Mapping[str, Any]) -> dict[str, Any]:
    """What came of a tokenizer's output by name, without the mask."""
    return {name: options[name] for name in TOKENIZED if options.get(name) is not None}


def read_config(config: object) -> GenerationConfig:
    """The generation config of a call; raises UserError for what is none, such as a mapping."""
    if config is not None and not isinstance(config, GenerationConfig):
        raise UserError(
            f"generation_config must be a GenerationConfig of transformers, got {config!r}"
        )
    return config or GenerationConfig()


def read_stop_strings(stops: object) -> tuple[str, ...]:
    """Texts that end an answer; raises UserError for what is no text, and for an empty one."""
    given = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(given, Collection) or not all(
        isinstance(each, str) and each for each in given
    ):
        raise UserError(f"stop_strings must be texts that are not empty, got {stops!r}")
    return tuple(given)


def read_max_new_tokens(options: DecodeOptions, given: Mapping[str, Any]) -> int | None:
    """Most new tokens; None where the config has a `max_length` alone."""
    count = options.get("max_new_tokens")
    if count is None:
        default = DEFAULT_MAX_NEW_TOKENS if given.get("max_length") is None else None
        count = given.get("max_new_tokens", default)
    return None if count is None else at_least(1, "max_new_tokens", count)


def read_num_return_sequences(
    options: DecodeOptions, given: Mapping[str, Any], sampling: SamplingConfig
) -> int:
    """Answers to each prompt; raises UserError for several that would all be the same."""
    count = options.get("num_return_sequences")
    if count is None:
        count = given.get("num_return_sequences", 1)
    count = at_least(1, "num_return_sequences", count)
    if count > 1 and sampling.greedy:
        raise UserError(
            f"num_return_sequences={count} without sampling would give equal answers: set a "
            "temperature above 0 or num_beams, or leave it out"
        )
    return count


def read_max_time(options: DecodeOptions, given: Mapping[str, Any]) -> float | None:
    """Seconds that answers may take; None without a limit."""
    seconds = options.get("max_time")
    if seconds is None:
        seconds = given.get("max_time")
    if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
        raise UserError(f"max_time must be a number of seconds above 0, got {seconds!r}")
    return seconds


def at_least(least: int, name: str, value: object) -> int:
    """The integer given for an option; raises UserError when it is none or too small."""
    number = integer_option(name, value)
    if number < least:
        raise UserError(f"{name} must be at least {least}, got {number}")
    return number


def whole_number(name: str, value: object) -> int | None:
    """The integer given for an option, if one is; raises UserError for what is none."""
    return None if value is None else integer_option(name, value)


def read_chunk_size(size: object) -> int:
    """The number of positions that one pass over a prompt reads; raises UserError below 1."""
    return at_least(1, "prefill_chunk_size", size)


def read_seed(seed: object) -> int | list[int]:
    """One seed or a list of seeds; None takes one from the operating system.

    Raises UserError for what is no integer.
    """
    if seed is None:
        return secrets.randbits(63)
    seeds = seed.tolist() if isinstance(seed, ARRAYS) else seed
    if integer(seeds) is None and is_list(seeds):
        return [integer_option("a seed", each) for each in seeds]
    return integer_option("seed", seeds)


def refuse_in_pieces(settings: DecodeSettings) -> None:
    """Raise UserError for options of `generate` where the caller gets tokens piece by piece."""
    if settings.streamer is not None:
        raise UserError(
            "streamer is an option of generate; stream and steps give pieces themselves"
        )
    if settings.beams is not None:
        raise UserError(
            "num_beams is an option of generate alone: no token is sure before the search has ended"
        )
