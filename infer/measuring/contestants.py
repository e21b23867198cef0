"""Ways of decoding that a comparison races: ours, and transformers' own as baselines."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from transformers.generation.streamers import BaseStreamer

from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.draft_model import same_tokenizer
from drafthead.infer.engine.results import DecodeStats
from drafthead.infer.request.decode_options import DecodeOptions


@dataclass(frozen=True)
class Answer:
    """One prompt decoded once. Tokens and seconds of decoding exclude those of the prompt pass."""

    sequence: list[int]  # new tokens, with the end token if it was reached
    decoded_tokens: int
    decode_seconds: float
    prefill_seconds: float
    stats: DecodeStats | None = None  # of our engine


@dataclass(frozen=True)
class Contestant(ABC):
    """A way of decoding with a name that is unique in a comparison."""

    mode: str
    drafter: str
    sampling: SamplingConfig
    verifier: str = field(default="auto", kw_only=True)
    is_chain: bool = field(default=False, kw_only=True)  # drafts token by token

    def prepare(self) -> None:  # noqa: B027  (nothing to prepare is a good default)
        """What must not happen while answers are timed."""

    @abstractmethod
    def decode(self, prompt: list[int], max_new_tokens: int, seed: int) -> Answer:
        """Decode one prompt."""


@dataclass(frozen=True)
class Ours(Contestant):
    """This project's engine with any drafter, or none."""

    decoder: Decoder

    @property
    def options(self) -> DecodeOptions:
        """What all answers are decoded with."""
        return {
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "verifier": self.verifier,
        }

    def prepare(self) -> None:
        """Time the steps from which trees are planned, and compile graphs."""
        self.decoder.warm_up(**self.options)

    def decode(self, prompt: list[int], max_new_tokens: int, seed: int) -> Answer:
        """Decode one prompt."""
        ask: DecodeOptions = {**self.options, "max_new_tokens": max_new_tokens, "seed": seed}
        result = self.decoder.generate(prompt, **ask)
        stats = result.stats
        return Answer(
            sequence=result.sequences[0],
            decoded_tokens=stats.decoded_tokens[0],
            decode_seconds=stats.decode_seconds,
            prefill_seconds=stats.seconds["prefill"],
            stats=stats,
        )


class FirstTokenClock(BaseStreamer):
    """Records when transformers returns its first tokens, and how many there are."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.first_at: float | None = None
        self.first_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt [1, T], then with each batch of new tokens [n]."""
        if not self.prompt_seen:
            self.prompt_seen = True
        elif self.first_at is None:
            self.first_at = time.perf_counter()
            self.first_tokens = value.numel()

    def end(self) -> None:
        """Called once at the end."""


@dataclass(frozen=True)
class Transformers(Contestant):
    """`model.generate`, alone or with `assistant_model`.

    `assistant_tokens` None leaves the assistant's length to transformers' own schedule.
    """

    target: Target
    assistant: Target | None = None
    assistant_tokens: int | None = None
    verifier: str = field(default="transformers", kw_only=True)

    def decode(self, prompt: list[int], max_new_tokens: int, seed: int) -> Answer:
        """Decode one prompt."""
        ids = torch.tensor([prompt], device=self.target.device)
        clock = FirstTokenClock()
        torch.manual_seed(seed)
        started = time.perf_counter()
        output = self.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **self._sampling_arguments(),
            **self._assistant_arguments(),
        )
        sequence = output[0, len(prompt) :].tolist()
        ended = time.perf_counter()
        first_at = clock.first_at or ended
        return Answer(
            sequence=sequence,
            decoded_tokens=len(sequence) - clock.first_tokens,
            decode_seconds=ended - first_at,
            prefill_seconds=first_at - started,
        )

    def _sampling_arguments(self) -> dict[str, object]:
        if self.sampling.greedy:
            # Unset values would come from the model's own generation config.
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {
            "do_sample": True,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
        }

    def _assistant_arguments(self) -> dict[str, object]:
        if self.assistant is None:
            return {}
        config = self.assistant.model.generation_config
        config.num_assistant_tokens = self.assistant_tokens or 20
        config.assistant_confidence_threshold = 0.0 if self.assistant_tokens else 0.4
        arguments: dict[str, object] = {"assistant_model": self.assistant.model}
        if not same_tokenizer(self.target, self.assistant):
            arguments |= {
                "tokenizer": self.target.tokenizer,
                "assistant_tokenizer": self.assistant.tokenizer,
            }
        return arguments
