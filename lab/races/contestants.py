"""Ways of decoding that a comparison races: ours, and transformers' own as baselines."""

import copy
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from drafthead.infer import Decoder, Target
from drafthead.infer.drafters.draft_model import same_tokenizer
from drafthead.lab.races.race import THEIR_RULE, Contestant, RacedAnswers


@dataclass(frozen=True)
class Ours(Contestant):
    """This project's engine with any drafter, or none."""

    decoder: Decoder

    @property
    def options(self) -> dict[str, Any]:
        """Return what all answers are decoded with."""
        return {
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "verifier": self.verifier,
        }

    def prepare(self, batch_size: int) -> None:
        self.decoder.warm_up((batch_size,), **self.options)

    def decode(self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int) -> RacedAnswers:
        result = self.decoder.generate(
            prompts, **self.options, max_new_tokens=max_new_tokens, seed=seed
        )
        stats = result.stats
        return RacedAnswers(
            sequences=result.sequences,
            decoded_tokens=sum(stats.decoded_tokens),
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
        """Called with the prompts [B, T], then with new tokens: n of one row, or one of each."""
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

    `assistant_tokens` None leaves the assistant's length to transformers' own schedule; it takes
    one prompt at a time. An assistant with another tokenizer drafts by text at temperature 0, and
    by shared tokens above it, where transformers 5.23 does not keep the target's distribution.
    """

    target: Target
    assistant: Target | None = None
    assistant_tokens: int | None = None
    verifier: str = field(default=THEIR_RULE, kw_only=True)

    def decode(self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int) -> RacedAnswers:
        """Decode a batch of prompts; one seed serves all rows."""
        inputs, begun = self._inputs(prompts)
        clock = FirstTokenClock()
        torch.manual_seed(seed)
        started = time.perf_counter()
        output = self.target.model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **self._sampling_arguments(),
            **self._assistant_arguments(),
        )
        generated = output[:, begun:].tolist()
        ended = time.perf_counter()
        first_at = clock.first_at or ended
        ends = self.target.end_ids
        sequences = [up_to_end(tokens, ends) for tokens in generated]
        return RacedAnswers(
            sequences=sequences,
            decoded_tokens=sum(map(len, sequences)) - clock.first_tokens,
            decode_seconds=ended - first_at,
            prefill_seconds=first_at - started,
        )

    def _inputs(self, prompts: Sequence[list[int]]) -> tuple[dict[str, Any], int]:
        """The prompts as arguments, and how many tokens the output has before the new ones.

        They are padded on the left for a decoder, and on the right for an encoder.
        """
        start, width = list(self.target.decoder_prompt), max(map(len, prompts))
        rows, mask = [], []
        for prompt in prompts:
            pad = [0] * (width - len(prompt))
            rows.append([*prompt, *pad] if start else [*pad, *prompt])
            mask.append([1] * len(prompt) + pad if start else pad + [1] * len(prompt))
        ids, there, begun = (
            torch.tensor(table, device=self.target.device)
            for table in (rows, mask, [start] * len(prompts))
        )
        inputs = {"input_ids": ids, "attention_mask": there}
        if not start:
            return inputs, width
        # Models that translate often search by beams where nothing else is asked for.
        return {**inputs, "decoder_input_ids": begun, "num_beams": 1}, len(start)

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


def changeable(assistant: Target) -> Target:
    """An assistant with another tokenizer, for sampling: a copy that shares its weights.

    transformers takes rows out of its output head and wraps its embeddings, for good, and knows by
    the tokenizers which assistant it has changed. Whoever else decodes with it would fail.
    """
    model = assistant.model
    weights = {id(table): table for table in (*model.parameters(), *model.buffers())}
    return Target(copy.deepcopy(model, weights), copy.copy(assistant.tokenizer))


def up_to_end(tokens: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """The tokens up to the first end token: 5 2 of 5 2 0 0 with end token 2."""
    places = (place for place, token in enumerate(tokens) if token in end_ids)
    return list(tokens[: next(places, len(tokens)) + 1])
