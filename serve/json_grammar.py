"""Answers that are JSON, by llguidance: tokens that would break the grammar are masked.

The mask is a logits processor, so the engine applies it at every node of a tree: a draft that
breaks the grammar is never accepted, and the answer is that of plain decoding under the mask.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers.generation.logits_process import LogitsProcessor

from drafthead.infer import Decoder
from drafthead.serve.errors import ApiError

FIELD = "response_format"


class JsonGrammars:
    """The grammars that requests ask for, over the tokens of one decoder."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The target's tokens as llguidance has them; it takes a moment."""
        ends = sorted(self.decoder.end_ids)
        return from_tokenizer(
            self.decoder.tokenizer,  # type: ignore[arg-type]  # the server has seen that it is one
            n_vocab=self.decoder.target.vocab_size,
            eos_token=ends,
        )

    def mask(self, wanted: dict[str, Any], prompt_length: int) -> "GrammarMask | None":
        """The mask of a `response_format`; None for text. Raises ApiError 400 for another."""
        kind = wanted.get("type")
        if kind == "text":
            return None
        schema: Any = {"type": "object"}
        if kind == "json_schema":
            schema = (wanted.get("json_schema") or {}).get("schema")
        if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
            raise ApiError(
                400, "response_format is text, json_object, or json_schema with a schema", FIELD
            )
        # Without free white space, which small models would write for ever.
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_flexible": False}
        )
        matcher = LLMatcher(self.tokens, grammar)
        if matcher.is_error():
            raise ApiError(400, f"the JSON schema is refused: {matcher.get_error()}", FIELD)
        return GrammarMask(matcher, self.decoder.target.vocab_size, prompt_length)


class GrammarMask(LogitsProcessor):
    """Minus infinity for every token that the grammar does not allow after an answer's tokens."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, prompt_length: int):
        self.matcher, self.prompt_length = matcher, prompt_length
        self.path: list[int] = []  # tokens that the matcher has read
        self.words = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        self.places = torch.arange(32, dtype=torch.int32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The masked scores [M, V] after input_ids [M, T]."""
        rows = [self._allowed(ids) for ids in input_ids[:, self.prompt_length :].tolist()]
        allowed = torch.stack(rows)[:, : scores.shape[1]].to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def _allowed(self, answer: Sequence[int]) -> torch.Tensor:
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
        return bits.flatten().bool()
