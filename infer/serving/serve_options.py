"""The options of `Decoder.serve`: those that requests of one batch share, and a request's own."""

from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from drafthead.heads.errors import UserError
from drafthead.infer.request.decode_options import DecodeOptions, read_options
from drafthead.infer.request.integers import integer_option
from drafthead.infer.serving.serve_request import ServeRequest

# The others are about one call with a known number of prompts.
SHARED = {
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "verifier",
    "typical_epsilon",
    "typical_delta",
    "lenience",
    "seed",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
}


def shared_options(options: DecodeOptions, max_rows: int) -> tuple[DecodeOptions, int]:
    """The checked options of a call of `serve`, and the seed of its first request.

    Raises UserError for an option that cannot be shared, for a list of seeds and for a max_rows
    below 1.
    """
    if integer_option("max_rows", max_rows) < 1:
        raise UserError(f"max_rows must be at least 1, got {max_rows}")
    settings = read_options(options)
    if other := sorted(name for name in options.keys() - SHARED if options.get(name) is not None):
        raise UserError(f"serve does not take {other[0]}: its requests come one by one")
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in settings.logits_processor):
        raise UserError("serve does not take prefix_allowed_tokens_fn, which counts prompts")
    if not isinstance(settings.seed, int):
        raise UserError("serve takes one seed; give each ServeRequest a seed of its own instead")
    return options, settings.seed


def own_options(request: ServeRequest, seed: int) -> DecodeOptions:
    """The options that a request gives for itself, with its seed, by default `seed`."""
    own: DecodeOptions = {"seed": seed if request.seed is None else request.seed}
    if request.max_new_tokens is not None:
        own["max_new_tokens"] = request.max_new_tokens
    return own
