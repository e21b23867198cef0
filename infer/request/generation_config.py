"""Options of transformers' `GenerationConfig`: some are applied, others refused by name.

An ignored penalty is a wrong answer that looks right. So penalties, n-grams and suppressed tokens
that are left unset come from the model's own `generation_config.json`, as in `model.generate`. How
to sample, to search and how long does not: without an option decoding is greedy and nothing is
filtered (`model.generate` might sample, from the top 50). What is applied and what is left out is
logged, a line each.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator
from transformers.generation.configuration_utils import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.settings import (
    CountPenalty,
    Flag,
    Integer,
    RepetitionPenalty,
    checked,
    names_of,
    settings,
)
from drafthead.infer.request.request import BeamOptions, DecodeOptions, TokenIds, tokens_of
from drafthead.infer.request.values import integer

logger = logging.getLogger(__name__)


def list_of_tokens(ids: object) -> frozenset[int]:
    """Several tokens."""
    if integer(ids) is not None:
        raise ValueError("must be a list of integers")
    return tokens_of(ids)


SeveralTokens = Annotated[frozenset[int], BeforeValidator(list_of_tokens)]
LONGEST = 40  # letters of a value that are logged

SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


@settings
class Processors:
    """The options that become logits processors; None is unset.

    transformers checks the values of those with type Any. It does not know frequency_penalty and
    presence_penalty, but its config accepts them: GenerationConfig(frequency_penalty=0.5).
    """

    bad_words_ids: Any = None
    begin_suppress_tokens: SeveralTokens | None = None
    exponential_decay_length_penalty: Any = None
    forced_bos_token_id: TokenIds | None = None
    forced_eos_token_id: TokenIds | None = None
    frequency_penalty: CountPenalty | None = None
    min_length: Integer | None = None
    min_new_tokens: Integer | None = None
    no_repeat_ngram_size: Integer | None = None
    presence_penalty: CountPenalty | None = None
    remove_invalid_values: Flag | None = None
    renormalize_logits: Flag | None = None
    repetition_penalty: RepetitionPenalty | None = None
    sequence_bias: Any = None
    suppress_tokens: SeveralTokens | None = None


@settings
class WithoutEffect:
    """Options about how transformers computes, and about encoders and padding: no answer depends on
    these.
    """

    bos_token_id: Integer | None = None
    cache_config: Any = None
    cache_implementation: Any = None
    compile_config: Any = None
    decoder_start_token_id: TokenIds | None = None
    disable_compile: Any = None
    pad_token_id: Integer | None = None
    transformers_version: Any = None
    use_cache: Flag | None = None


# What `model.generate` does itself or leaves to a processor, where it only prepares a call.
PREPARED = {
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "guidance_scale", "output_logits", "output_scores", "return_dict_in_generate", "token_healing",
    "top_h", "watermarking_config",
}  # fmt: skip
PROCESSORS, WITHOUT_EFFECT = names_of(Processors), names_of(WithoutEffect)
# Of the model's own settings these are applied where nothing else is given. `model.generate` knows
# no frequency and presence penalty, and a target begins its answers with the forced token itself.
OWN = PROCESSORS - {"forced_bos_token_id", "frequency_penalty", "presence_penalty"}
OF_CALLS = names_of(DecodeOptions) & vars(GenerationConfig()).keys()
KNOWN = PROCESSORS | WITHOUT_EFFECT | OF_CALLS | names_of(BeamOptions) | {*SAMPLING, "do_sample"}
# What to do instead of setting some of the options that are not supported.
INSTEAD = {
    "output_scores": "ask for logprobs",
    "output_logits": "ask for logprobs",
    "return_dict_in_generate": "generate always returns a result with fields",
} | dict.fromkeys(
    (
        "assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "target_lookbehind",
    ),
    "what is drafted is chosen when a Decoder is made",
)  # fmt: skip
# Options that are not supported change nothing at these values.
NEUTRAL = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "num_beams": 1,
}


def set_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a config that are set and change something."""
    defaults = vars(GenerationConfig())
    return {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_")
        and value is not None
        and value is not False
        and value != defaults.get(name)
        and value != NEUTRAL.get(name)
    }


def own_settings(own: GenerationConfig) -> dict[str, Any]:
    """The part of a model's own generation config that is applied to its answers."""
    return {key: value for key, value in set_options(own).items() if key in OWN}


def with_own_settings(
    config: GenerationConfig, own: GenerationConfig | None, name: str
) -> GenerationConfig:
    """A call's config, in which what is unset comes from the model's own: see `OWN`.

    What of the model's own is applied and what is left out is logged once for each model, `name`.
    """
    if own is None:
        return config
    given = own_settings(own)
    tell_of_own_settings(name, *(listed(part) for part in (given, left_out_of(own, given))))
    missing = {key: value for key, value in given.items() if getattr(config, key, None) is None}
    if not missing:
        return config
    config = copy.deepcopy(config)
    config.update(**missing)
    return config


def left_out_of(own: GenerationConfig, applied: Mapping[str, Any]) -> dict[str, Any]:
    """Names of a model's own settings that are neither applied nor without effect."""
    heeded = WITHOUT_EFFECT | {"eos_token_id", "forced_bos_token_id"} | applied.keys()
    neutral = {"top_p": 1.0, "temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    return {
        key: value
        for key, value in set_options(own).items()
        if key not in heeded and value != neutral.get(key)
    }


def listed(settings: Mapping[str, Any]) -> str:
    """Settings for a sentence; long lists are shortened."""
    texts = {key: repr(value) for key, value in sorted(settings.items())}
    return ", ".join(
        f"{key}={text if len(text) <= LONGEST else text[:LONGEST] + '...'}"
        for key, text in texts.items()
    )


@cache
def tell_of_own_settings(name: str, applied: str, left_out: str) -> None:
    """Say, once for each model, what of its own settings holds for answers."""
    if applied:
        logger.warning("as the generation config of %s says, answers have %s", name, applied)
    if left_out:
        logger.warning(
            "not applied of the generation config of %s: %s; sampling, beams and lengths are as "
            "the options of a call say",
            name,
            left_out,
        )


def given_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a config that are set and change something.

    Raises UserError for one that is not supported here, and for a wrong value.
    """
    given = set_options(config)
    check_supported(given)
    return given


def check_supported(given: Mapping[str, Any]) -> None:
    """Raise UserError for an option of a config that is not supported here, or a wrong value."""
    if refused := sorted(given.keys() - KNOWN):
        raise UserError(
            f"generation_config sets {refused[0]}={given[refused[0]]!r}, which is not supported "
            f"here: {INSTEAD.get(refused[0], 'leave it out')}"
        )
    checked("do_sample", Flag, given.get("do_sample", True))
    for kind in (Processors, WithoutEffect, BeamOptions, SamplingConfig, DecodeOptions):
        kind(**{name: given[name] for name in names_of(kind) & given.keys()})


def refuse_other_start(config: GenerationConfig, decoder_prompt: Sequence[int]) -> None:
    """Raise UserError when a config lets the decoder begin with other tokens than the target's.

    Without an encoder there is no `decoder_prompt`, and the start token has no effect.
    """
    names = ("decoder_start_token_id", "forced_bos_token_id")
    for name, token in zip(names, decoder_prompt, strict=False):
        given = getattr(config, name)
        if given not in (None, token):
            raise UserError(
                f"generation_config sets {name}={given}, but the model's own is {token}: set it in "
                "the model's generation config before the Decoder is made"
            )


def refuse_unprepared(config: GenerationConfig) -> None:
    """Raise UserError for an option that `model.generate` has not dealt with before it decodes.

    By then it has filled in its own defaults, and turned most options into processors and criteria.
    """
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in sorted(vars(config).items()):
        known = name.startswith("_") or name in KNOWN | PREPARED
        if known or value is None or value is False:
            continue
        if value not in (defaults.get(name), NEUTRAL.get(name)):
            raise UserError(f"{name}={value!r} is not supported with custom_generate: leave it out")


def sampling_from(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> SamplingConfig:
    """The sampling of a config's options and of a call's arguments, which win.

    Greedy unless the argument `temperature` or the config's `do_sample` asks for sampling. Raises
    UserError when the config sets sampling options without `do_sample`.
    """
    settings = {"temperature": 1.0} | {name: given[name] for name in SAMPLING if name in given}
    if "temperature" not in arguments and "do_sample" not in given:
        for name, neutral in SAMPLING.items():
            if given.get(name, neutral) != neutral:
                raise UserError(
                    f"generation_config sets {name}={given[name]} without do_sample=True, so it "
                    "would have no effect: set do_sample, or leave it out"
                )
        settings["temperature"] = 0.0
    named = {name: arguments[name] for name in SAMPLING if name in arguments}
    return SamplingConfig(**settings | named)
