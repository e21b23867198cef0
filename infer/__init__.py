"""drafthead.infer: decoding with draft heads, draft models, prompt lookup, or nothing."""

from drafthead.core.target.target import Target
from drafthead.infer.answers.results import DecodeResult, Logprobs, TextStream
from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.stats import DecodeStats
from drafthead.infer.request.request import DecodeOptions
from drafthead.infer.serving import Answer, ServeRequest

__all__ = [
    "Answer",
    "DecodeOptions",
    "DecodeResult",
    "DecodeStats",
    "Decoder",
    "Logprobs",
    "ServeRequest",
    "Target",
    "TextStream",
]
