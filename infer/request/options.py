"""From the keywords of one call, and its `GenerationConfig`, to its checked options."""

import copy
import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig

from drafthead.core.errors import UserError, first_line
from drafthead.core.sampling import SamplingConfig
from drafthead.core.settings import names_of, values
from drafthead.infer.request.generation_config import PROCESSORS, given_options, sampling_from
from drafthead.infer.request.other_words import refuse_unknown_options
from drafthead.infer.request.request import TOKENIZED, BeamOptions, DecodeOptions
from drafthead.infer.verifiers.base import options_of_rule, verifier_for

# Fields of `DecodeOptions` that are groups of options, and those that only a config has.
GROUPS = {"sampling": SamplingConfig, "beams": BeamOptions}
NOT_KEYWORDS = ("rule_options", "max_length", "eos_token_id", "prefill_chunk_size")


def keywords() -> list[str]:
    """The options of a call by name, those of its rule aside."""
    own = [each.name for each in fields(DecodeOptions) if each.name not in NOT_KEYWORDS]
    parts = [[f.name for f in fields(GROUPS[name])] if name in GROUPS else [name] for name in own]
    return list(dict.fromkeys([name for part in parts for name in part] + sorted(PROCESSORS)))


NAMES = keywords()
# These are about one call with a known number of prompts: `serve` and `chat` do not take them.
OF_ONE_CALL = {
    *TOKENIZED, *names_of(BeamOptions), "attention_mask", "continue_final_message", "max_time",
    "streamer", "logprobs",
}  # fmt: skip
# What a call of beam search cannot have, in its options or in its config.
NOT_WITH_BEAMS = ("max_time", "stop_strings", "stopping_criteria", "streamer", "logprobs")


def read_options(options: Mapping[str, Any]) -> DecodeOptions:
    """Check the options of a call and join them with its generation config.

    Raises UnknownOptionError, which is a TypeError too, for a name that does not exist, and
    UserError for an option that cannot be honoured or has an impossible value.
    """
    named = {name: value for name, value in options.items() if value is not None}
    rule, _, text = str(named.get("verifier", "auto")).partition(":")
    of_rule = options_of_rule(rule, named.keys() - set(NAMES)) - set(NAMES)
    if text:  # NAME:OPTION=VALUE,..., as in the shell
        written = values(text.split(","), "verifier")
        if unknown := sorted(written.keys() - of_rule):
            raise UserError(f"verifier {rule!r} has no option {unknown[0]}")
        named |= {"verifier": rule, **written}
    refuse_unknown_options({**options, **named}, [*NAMES, *of_rule])
    config = config_of(named)
    given = given_options(config)
    if "seed" in options:
        named.setdefault("seed", secrets.randbits(63))
    if "max_length" in given:
        given.setdefault("max_new_tokens", None)
    merged, sampling = given | named, sampling_from(given, named)
    if (beams := read_beams(merged, sampling)) is not None:
        merged.pop("num_return_sequences", None)  # they are of the beams
    asked = {name: named[name] for name in of_rule if name in named}
    chosen = verifier_for(merged.get("verifier", "auto"), sampling.temperature).with_options(asked)
    found = DecodeOptions(
        **{name: merged[name] for name in names_of(DecodeOptions) & merged.keys()},
        generation_config=config,
        sampling=sampling,
        beams=beams,
        rule_options={name: chosen.options[name] for name in asked},
    )
    if found.num_return_sequences > 1 and sampling.greedy:
        raise UserError(
            f"num_return_sequences={found.num_return_sequences} without sampling would give equal "
            "answers: set a temperature above 0 or num_beams, or leave it out"
        )
    return found


def config_of(named: dict[str, Any]) -> GenerationConfig:
    """The config of a call, with the keywords that become processors, which are taken out.

    Raises UserError for what is none, and for what transformers refuses.
    """
    config = named.pop("generation_config", None) or GenerationConfig()
    if not isinstance(config, GenerationConfig):
        raise UserError(
            f"generation_config must be a GenerationConfig of transformers, got {config!r}"
        )
    if own := {name: named.pop(name) for name in PROCESSORS & named.keys()}:
        config = copy.deepcopy(config)
        for name, value in own.items():
            setattr(config, name, value)
        try:
            config.validate()
        except ValueError as error:
            raise UserError(first_line(error)) from error
    return config


def refuse_in_pieces(options: DecodeOptions) -> None:
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

    Raises UserError for what beam search does not support, and for its options without beams.
    """
    beams = BeamOptions(**{name: merged[name] for name in names_of(BeamOptions) & merged.keys()})
    if beams.num_beams == 1:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if merged.get(name, neutral) != neutral:
                raise UserError(f"{name}={merged[name]!r} needs num_beams above 1")
        return None
    if not sampling.greedy:
        raise UserError(
            "beam search does not sample: leave out num_beams, or temperature and do_sample"
        )
    if merged.get("verifier", "auto") != "auto":
        raise UserError(
            "num_beams cannot be combined with a verifier: beam search is a rule of its own"
        )
    for name in NOT_WITH_BEAMS:
        # A number is a setting, be it 0; no texts and no criteria are none.
        if (value := merged.get(name)) or isinstance(value, int):
            raise UserError(f"num_beams cannot be combined with {name}: leave one of them out")
    return beams
