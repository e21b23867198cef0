"""The options of `Decoder.serve` and `chat`: what requests share, and what a request has itself."""

from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from drafthead.heads.errors import UserError
from drafthead.infer.request.decode_options import DecodeOptions, DecodeSettings, read_options
from drafthead.infer.request.integers import integer_option
from drafthead.infer.serving.serve_request import ServeRequest
from drafthead.infer.verifiers import verifier_for

# The others are about one call with a known number of prompts.
SHARED = {
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "stop_strings",
    "verifier",
    "typical_epsilon",
    "typical_delta",
    "lenience",
    "accept_top",
    "accept_distance",
    "min_block",
    "seed",
    "generation_config",
    "chat_template_kwargs",
    "use_model_defaults",
    "logits_processor",
    "stopping_criteria",
}


def shared_options(options: DecodeOptions, max_rows: int) -> tuple[DecodeOptions, int]:
    """The checked options of a call of `serve`, and the seed of its first request.

    Raises UserError for an option that cannot be shared, for a verifier that does not fit, for a
    list of seeds and for a max_rows below 1.
    """
    if integer_option("max_rows", max_rows) < 1:
        raise UserError(f"max_rows must be at least 1, got {max_rows}")
    settings = read_options(options)
    verifier_for(settings.verifier, settings.sampling.temperature)
    refuse_others(options, settings, "serve does not take {}: its requests come one by one")
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in settings.logits_processor):
        raise UserError("serve does not take prefix_allowed_tokens_fn, which counts prompts")
    if not isinstance(settings.seed, int):
        raise UserError("serve takes one seed; give each ServeRequest a seed of its own instead")
    return options, settings.seed


def chat_settings(options: DecodeOptions) -> DecodeSettings:
    """The checked options of `Decoder.chat`; raises UserError for one that a turn cannot have."""
    settings = read_options(options)
    refuse_others(options, settings, "chat does not take {}: each of its turns is one answer")
    return settings


def refuse_others(options: DecodeOptions, settings: DecodeSettings, sentence: str) -> None:
    """Raise UserError, a sentence with the option's name, for one that is not in `SHARED`."""
    others = [name for name in options.keys() - SHARED if options.get(name) is not None]
    # These may also come in a generation config.
    if settings.num_return_sequences > 1:
        others.append("num_return_sequences")
    if settings.beams is not None:
        others.append("num_beams")
    if settings.max_seconds is not None:
        others.append("max_time")
    if others:
        raise UserError(sentence.format(min(others)))


def own_options(request: ServeRequest, seed: int) -> DecodeOptions:
    """The options that a request gives for itself, with its seed, by default `seed`."""
    own: DecodeOptions = {"seed": seed if request.seed is None else request.seed}
    given: DecodeOptions = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "stop_strings": request.stop_strings,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    own.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    return own
