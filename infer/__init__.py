"""drafthead.infer: decoding with draft heads, draft models, prompt lookup, or nothing."""

from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.results import DecodeResult, DecodeStats, Logprobs, TextStream
from drafthead.infer.request.decode_options import DecodeOptions

__all__ = ["DecodeOptions", "DecodeResult", "DecodeStats", "Decoder", "Logprobs", "TextStream"]
