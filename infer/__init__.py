"""drafthead.infer: decoding with draft heads, draft models, prompt lookup, or nothing."""

from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.results import DecodeResult, DecodeStats

__all__ = ["DecodeResult", "DecodeStats", "Decoder"]
