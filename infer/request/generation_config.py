"""What a `GenerationConfig` of transformers asks for, in this project's terms.

Every option that is set is either applied or refused by name: an ignored penalty is a wrong answer
that looks right. Options left unset are off. `model.generate` would fill those from the model's own
`generation_config.json` and then from its defaults (top_k 50); whoever wants the model's own
settings passes `model.generation_config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig

DEFAULT_MAX_NEW_TOKENS = 128

SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
# Become logits processors. The two penalties are no option of transformers, whose config carries
# them all the same: GenerationConfig(frequency_penalty=0.5).
PROCESSORS = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "frequency_penalty",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "presence_penalty",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "sequence_bias",
    "suppress_tokens",
}
LENGTHS_AND_ENDS = {"do_sample", "eos_token_id", "max_length", "max_new_tokens", "stop_strings"}
# Say how transformers computes, how its assistant drafts, or what only encoders and padding need;
# answers do not depend on them.
WITHOUT_EFFECT = {
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "pad_token_id",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
}
KNOWN = PROCESSORS | LENGTHS_AND_ENDS | WITHOUT_EFFECT | set(SAMPLING)
# At these values an option that is not supported changes nothing.
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
    "num_return_sequences": 1,
}


@dataclass(frozen=True)
class GenerationOptions:
    """How to decode, from a config and from the arguments that take precedence over it."""

    config: GenerationConfig  # for the logits processors
    sampling: SamplingConfig
    max_new_tokens: int | None  # None: max_length alone limits the answer
    max_length: int | None  # of prompt and answer together
    end_ids: frozenset[int] | None  # None: the target's own
    stop_strings: tuple[str, ...]

    def limit(self, prompt_length: int) -> int:
        """Most new tokens for a prompt; below 1 when max_length leaves no room."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        assert self.max_length is not None
        return self.max_length - prompt_length


def read_options(
    config: GenerationConfig | None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> GenerationOptions:
    """Join a config with arguments, which win where both are given.

    Raises UserError for an option that cannot be honoured or has an impossible value.
    """
    config = config or GenerationConfig()
    given = set_options(config)
    if refused := sorted(given.keys() - KNOWN):
        raise UserError(
            f"generation_config sets {refused[0]}={given[refused[0]]!r}, which is not supported "
            "here: leave it out"
        )
    if max_new_tokens is None:
        max_new_tokens = given.get("max_new_tokens")
    max_length = given.get("max_length")
    if max_new_tokens is None and max_length is None:
        max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    stops = given.get("stop_strings") or ()
    ends = given.get("eos_token_id")
    return GenerationOptions(
        config=config,
        sampling=sampling_from(given, temperature, top_k, top_p),
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        end_ids=None if ends is None else token_ids(ends),
        stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
    )


def set_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a config that are set and not neutral."""
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


def sampling_from(
    given: dict[str, Any], temperature: float | None, top_k: int | None, top_p: float | None
) -> SamplingConfig:
    """Greedy unless the argument `temperature` or the config's `do_sample` says otherwise."""
    if temperature is None and "do_sample" not in given:
        for name, neutral in SAMPLING.items():
            if given.get(name, neutral) != neutral:
                raise UserError(
                    f"generation_config sets {name}={given[name]} without do_sample=True, so it "
                    "would have no effect: set do_sample, or leave it out"
                )
        temperature = 0.0
    settings = {"temperature": 1.0} | {name: given[name] for name in SAMPLING if name in given}
    arguments = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings |= {name: value for name, value in arguments.items() if value is not None}
    return SamplingConfig(**settings)


def token_ids(ids: int | Sequence[int]) -> frozenset[int]:
    """One token id or several, as transformers' `eos_token_id` has them."""
    return frozenset([ids] if isinstance(ids, int) else ids)
