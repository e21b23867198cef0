"""Answers that are JSON, by llguidance: tokens that would break the grammar are masked.

The mask is a logits processor, so the engine applies it at every node of a tree: a draft that
breaks the grammar is never accepted, and the answer is that of plain decoding under the mask.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from select import select
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers.generation.logits_process import LogitsProcessor

from drafthead.infer import Decoder
from drafthead.serve.errors import ApiError

FIELD = "response_format"
MOST_KNOWN = 8  # compiled grammars that are kept
# What compiling a grammar may take, and a process that does so has in all: `grammar_trial.py`.
TRIAL_SECONDS, MOST_BYTES = 2.0, 512 << 20


class JsonGrammars:
    """The grammars that requests ask for, over the tokens of one decoder."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.trial = decoder, GrammarTrial()
        self.known: dict[str, LLMatcher] = {}  # those that were asked for last, as they begin

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer in a form: the target's, or else the tokenizer's own."""
        assert self.decoder.tokenizer is not None
        ends = self.decoder.end_ids or {self.decoder.tokenizer.eos_token_id}
        size = self.decoder.target.vocab_size
        return frozenset(end for end in ends if end is not None and end < size)

    @cached_property
    def tokens(self) -> LLTokenizer | None:
        """The tokens as llguidance has them; None for a tokenizer whose bytes it does not know.

        It takes a moment.
        """
        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None
        size = max(self.decoder.target.vocab_size, len(tokenizer))
        with suppress(ValueError):
            return from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(self.ends) or None)  # type: ignore[arg-type]
        return None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        if self.tokens is None:
            return str(self.decoder.tokenizer.decode([token])).encode()  # type: ignore[union-attr]
        return self.tokens.decode_bytes([token])

    def mask(self, schema: Any, prompt_length: int, least: int) -> "GrammarMask":
        """The mask that keeps an answer in the form of a schema, from `least` tokens on to its end.

        Raises ApiError 400 for a schema that allows no text, and for a target without an end.
        """
        if self.tokens is None or not self.ends:
            raise ApiError(400, "this model's tokens have no known bytes, or no end", FIELD)
        # Without free white space, which small models would write for ever.
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_flexible": False}
        )
        matcher = self.compiled(grammar)
        if matcher.is_error():
            raise ApiError(400, f"the JSON schema is refused: {matcher.get_error()}", FIELD)
        mask = GrammarMask(matcher, self.tokens.vocab_size, prompt_length, self.ends, least)
        mask.allowed([])
        if matcher.is_stopped():
            raise ApiError(400, "the JSON schema is refused: no text has this form", FIELD)
        return mask

    def compiled(self, grammar: str) -> LLMatcher:
        """A matcher of a grammar; raises ApiError 400 where it takes too much time or memory."""
        assert self.tokens is not None
        assert self.tokens is not None
        if grammar not in self.known:
            self.trial.refuse_costly(grammar)
            found = LLMatcher(self.tokens, grammar, log_level=0)
            self.known = dict([*self.known.items(), (grammar, found)][-MOST_KNOWN:])
        return self.known[grammar].deep_copy()


class GrammarTrial:
    """The process that compiles grammars before the server does; used by one thread."""

    process: subprocess.Popen[str] | None = None

    def refuse_costly(self, grammar: str) -> None:
        """Raise ApiError 400 for a grammar that takes too much time or memory; others are fine."""
        if self.process is None or self.process.poll() is not None:
            path = str(Path(__file__).with_name("grammar_trial.py"))
            self.process = subprocess.Popen(
                [sys.executable, path, str(MOST_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._answer(None)
        assert self.process.stdin is not None
        with suppress(OSError):  # it has just ended
            self.process.stdin.write(json.dumps(grammar) + "\n")
            self.process.stdin.flush()
            if self._answer(TRIAL_SECONDS):
                return
        self.process.kill()
        self.process.wait()
        most = f"{TRIAL_SECONDS:.0f} seconds or {MOST_BYTES >> 20} MiB to compile"
        raise ApiError(400, f"the JSON schema is refused: it takes more than {most}", FIELD)

    def _answer(self, seconds: float | None) -> str:
        """The next line of the process; nothing where it has ended, or needs longer."""
        assert self.process is not None and self.process.stdout is not None
        is_there, _, _ = select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if is_there else ""


class GrammarMask(LogitsProcessor):
    """Minus infinity for every token that the grammar does not allow after an answer's tokens."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        prompt_length: int,
        ends: Collection[int],
        least: int,
    ):
        """Of an answer of fewer tokens than `least` the end is allowed where nothing else is."""
        self.matcher, self.prompt_length = matcher, prompt_length
        self.ends, self.least = sorted(ends), least
        self.path: list[int] = []  # tokens that the matcher has read
        self.words = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        self.places = torch.arange(32, dtype=torch.int32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The masked scores [M, V] after input_ids [M, T]."""
        rows = [self.allowed(ids) for ids in input_ids[:, self.prompt_length :].tolist()]
        allowed = torch.stack(rows)[:, : scores.shape[1]].to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def allowed(self, answer: Sequence[int]) -> torch.Tensor:
        """Which tokens [V] may follow the answer; the nodes of a tree come in any order."""
        pairs = zip(self.path, answer, strict=False)
        common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if common is None:
            common = min(len(self.path), len(answer))
        self.matcher.rollback(len(self.path) - common)
        self.matcher.consume_tokens(list(answer[common:]))
        self.path = list(answer)
        if self.matcher.is_error():  # a form too hard to follow: this row fails, and no other
            return torch.zeros(32 * len(self.words), dtype=torch.bool)
        self.matcher.unsafe_compute_mask_ptr(self.words.data_ptr(), self.words.numel() * 4)
        bits = (self.words[:, None] >> self.places) & 1
        allowed = bits.flatten().bool()
        if len(answer) < self.least:
            longer = allowed.index_fill(0, torch.tensor(self.ends), False)
            return longer if longer.any() else allowed
        return allowed
