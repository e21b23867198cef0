"""Answers in a form, by llguidance: tokens that would break the grammar are masked.

The mask is a logits processor, so the engine applies it at every node of a tree: a draft that
breaks the grammar is never accepted, and the answer is that of plain decoding under the mask.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from select import poll
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from llguidance.hf import from_tokenizer
from transformers.generation.logits_process import LogitsProcessor

from drafthead.core.drafting.form import AnswerForm, Forced
from drafthead.infer import Decoder
from drafthead.infer.scheduling.past import common_prefix
from drafthead.serve.answer_text import CALL, END_OF_CALL, END_OF_THOUGHT, THOUGHT
from drafthead.serve.errors import ApiError

MOST_CHARACTERS = 1 << 16  # of a form that is no JSON schema
MOST_KNOWN = 8  # compiled grammars that are kept
# What compiling a grammar may take, and a process that does so has in all: `grammar_trial.py`.
TRIAL_SECONDS, MOST_BYTES = 2.0, 512 << 20
# Without free white space, which small models would write for ever.
COMPACT = {"whitespace_flexible": False}
SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}  # as templates show calls


def schema_grammar(schema: Any, field: str, spaces: Mapping[str, Any] = COMPACT) -> dict[str, Any]:
    """The grammar of a JSON schema, which may come as a text; raises ApiError 400 for no schema."""
    with suppress(ValueError, RecursionError):
        schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ApiError(400, f"{field} is a JSON schema, which is an object", field)
    return {"json_schema": {"x-guidance": spaces, **schema}}


def of_objects(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A schema for objects, which people often do not say; ApiError 400 for one without objects."""
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ApiError(400, f"{field}: the type of this schema is object, and not {kinds}", field)
    return {**schema, "type": "object"}


def text_grammar(kind: str, given: Any, field: str) -> dict[str, Any]:
    """The grammar of a `regex`, of a `choice` of texts, or a `grammar` in Lark's form or GBNF.

    Raises ApiError 400 for what is none.
    """
    texts = given if isinstance(given, list) else [given]
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise ApiError(400, f"{field} may have {MOST_CHARACTERS} characters at most", field)
    if kind == "choice":
        texts = [json.dumps(text, ensure_ascii=False) for text in texts]
        return {"lark_grammar": f"start: {' | '.join(texts)}"}
    if kind == "regex":
        found: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(given))["grammars"][0]
        return {"lark_grammar": found["lark_grammar"]}
    try:
        return {"lark_grammar": any_to_lark(given)}
    except (GbnfToLarkError, RecursionError) as error:
        raise ApiError(400, f"the grammar is refused: {error}", field) from error


@dataclass(frozen=True)
class Form:
    """The form of an answer: a text of a grammar, or calls of functions."""

    field: str  # of the request that asks for it
    text: Mapping[str, Any] | None = None  # a grammar
    functions: Sequence[Mapping[str, Any]] = ()  # that may be called
    several: bool = False  # calls
    thinks: bool | None = None  # whether it begins in thoughts; None: it may begin with some

    def grammar(self, mark: Callable[[str], str]) -> str:
        """All of it as one grammar; `mark` writes a mark as tokens have it."""
        named = {} if self.text is None else {"text": self.text}
        calls = [f"call{number}" for number in range(len(self.functions))]
        for call, function in zip(calls, self.functions, strict=True):
            schema = of_objects(function.get("parameters") or {}, "tools")
            named |= {call: schema_grammar(schema, "tools", SPACED)}
        parts = [*(["@text"] if self.text is not None else []), *(["calls"] if calls else [])]
        before = {True: "thought ", False: "", None: f"({mark(THOUGHT)} thought)? "}[self.thinks]
        rules = [f"start: {before}({' | '.join(parts)})", *self._calls(calls, mark)]
        if before:
            end, gap = mark(END_OF_THOUGHT), "/\\s*/"
            has_text = end.startswith('"')
            rules += [f"thought: thinking {gap}" if has_text else f"thought: thinking {end} {gap}"]
            rules += [f"thinking{f'[suffix={end}]' if has_text else ''}: /(?s:.*)/"]
        others = [{"name": name, **grammar} for name, grammar in named.items()]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *others]})

    def _calls(self, calls: Sequence[str], mark: Callable[[str], str]) -> list[str]:
        """The rules of calls as the template of Hermes and Qwen writes them."""
        if not calls:
            return []
        begin, end = f'{mark(CALL)} "\\n{{\\"name\\": "', f'"}}\\n" {mark(END_OF_CALL)}'
        heads = [f'{json.dumps(each["name"])}, "arguments": ' for each in self.functions]
        pairs = zip(calls, heads, strict=True)
        own = " | ".join(f"{json.dumps(head)} @{call}" for call, head in pairs)
        more = ' ("\\n" call)*' if self.several else ""
        return [f"calls: call{more}", f"call: {begin} ({own}) {end}"]


class JsonGrammars:
    """The grammars that requests ask for, over the tokens of one decoder."""

    def __init__(self, decoder: Decoder):
        assert decoder.tokenizer is not None  # `Server` has seen to it
        # Not the decoder: its drafter and what it has kept go when other drafts are loaded.
        self.end_ids, self.vocab_size = decoder.end_ids, decoder.target.vocab_size
        self.tokenizer, self.trial = decoder.tokenizer, GrammarTrial()
        self.known: dict[str, LLMatcher] = {}  # those that were asked for last, as they begin

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer in a form: the target's, or else the tokenizer's own."""
        ends = self.end_ids or {self.tokenizer.eos_token_id}
        return frozenset(end for end in ends if end is not None and end < self.vocab_size)

    @cached_property
    def tokens(self) -> LLTokenizer | None:
        """The tokens as llguidance has them; None for a tokenizer whose bytes it does not know.

        It takes a moment.
        """
        size, ends = max(self.vocab_size, len(self.tokenizer)), sorted(self.ends)
        with suppress(ValueError):
            return from_tokenizer(self.tokenizer, n_vocab=size, eos_token=ends or None)  # type: ignore[arg-type]
        return None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        if self.tokens is None:
            return str(self.tokenizer.decode([token])).encode()
        return self.tokens.decode_bytes([token])

    def mark(self, text: str) -> str:
        """A mark in Lark's form: its token where llguidance takes that for a special one, as it
        does all added tokens in angle brackets; else its text.
        """
        assert self.tokens is not None
        for number, added in self.tokenizer.added_tokens_decoder.items():
            if added.content == text and self.tokens.is_special_token(number):
                return f"<[{number}]>"
        return json.dumps(text)

    def mask(
        self, form: Form, prompt_length: int, least: int, stops: Collection[int] = ()
    ) -> "GrammarMask":
        """The mask that keeps an answer in a form, and `least` tokens from its end and `stops`.

        Raises ApiError 400 for a form that allows no text, and for a target without an end.
        """
        field = form.field
        if self.tokens is None or not self.ends:
            raise ApiError(400, "this model's tokens have no known bytes, or no end", field)
        matcher = self.compiled(form)
        ends, size = self.ends.union(stops), self.vocab_size
        mask = GrammarMask(matcher, self.tokens, prompt_length, ends, least, field, size)
        mask.allowed([])
        if matcher.is_stopped():
            raise ApiError(400, f"{field} is refused: no text has this form", field)
        return mask

    def compiled(self, form: Form) -> LLMatcher:
        """A matcher of a form; raises ApiError 400 where it has none, or a costly one."""
        assert self.tokens is not None
        grammar = form.grammar(self.mark)
        if grammar not in self.known:
            # The trial has other tokens: marks are texts there, and no others are known.
            self.trial.refuse_costly(form.grammar(json.dumps), form.field)
            found = LLMatcher(self.tokens, grammar, log_level=0)
            if found.is_error():
                error = found.get_error().splitlines()[0]
                raise ApiError(400, f"{form.field} is refused: {error}", form.field)
            self.known = dict([*self.known.items(), (grammar, found)][-MOST_KNOWN:])
        return self.known[grammar].deep_copy()


class GrammarTrial:
    """The process that compiles grammars before the server does; used by one thread."""

    process: subprocess.Popen[str] | None = None

    def refuse_costly(self, grammar: str, field: str) -> None:
        """Raise ApiError 400 for a grammar that is none, or takes too much time or memory."""
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
            if answer := self._answer(TRIAL_SECONDS):
                if error := json.loads(answer):
                    raise ApiError(400, f"{field} is refused: {error.splitlines()[0]}", field)
                return
        self.process.kill()
        self.process.wait()
        most = f"{TRIAL_SECONDS:.0f} seconds or {MOST_BYTES >> 20} MiB to compile"
        raise ApiError(400, f"{field} is refused: it takes more than {most}", field)

    def _answer(self, seconds: float | None) -> str:
        """The next line of the process; nothing where it has ended, or needs longer."""
        assert self.process is not None and self.process.stdout is not None
        waiting = poll()  # `select` knows no files above the first 1,024
        waiting.register(self.process.stdout)
        is_there = waiting.poll(None if seconds is None else 1000 * seconds)
        return self.process.stdout.readline() if is_there else ""


class Reading:
    """A matcher of a grammar, and the tokens that it has read."""

    def __init__(self, matcher: LLMatcher):
        self.matcher, self.path = matcher, list[int]()

    def after(self, answer: Sequence[int]) -> LLMatcher:
        """The matcher after an answer, from where it stood before."""
        common = common_prefix(self.path, answer)
        self.matcher.rollback(len(self.path) - common)
        self.matcher.consume_tokens(list(answer[common:]))
        self.path = list(answer)
        return self.matcher


class GrammarMask(LogitsProcessor, AnswerForm):
    """Minus infinity for every token that the grammar does not allow after an answer's tokens."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: LLTokenizer,
        prompt_length: int,
        ends: Collection[int],
        least: int,
        field: str,  # of the request that asks for the form
        size: int,  # of the target's vocabulary
    ):
        """Of an answer of fewer tokens than `least` the end is allowed where nothing else is."""
        # A matcher that has failed stays so: what drafts ask must not end an answer.
        self.text, self.drafts = Reading(matcher), Reading(matcher.deep_copy())
        self.tokens, self.prompt_length, self.field = tokens, prompt_length, field
        self.ends, self.least, self.size = sorted(ends), least, size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The masked scores [M, V] after input_ids [M, T]."""
        rows = [self.allowed(ids) for ids in input_ids[:, self.prompt_length :].tolist()]
        allowed = torch.stack(rows)[:, : scores.shape[1]].to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def allowed(self, answer: Sequence[int]) -> torch.Tensor:
        """Mark the tokens [V] that may follow the answer; nodes of a tree come in any order."""
        matcher = self.text.after(answer)
        bias = bytearray(matcher.compute_logit_bias())  # not 0 where a token may follow
        allowed = torch.frombuffer(bias, dtype=torch.uint8).bool()
        if matcher.is_error():  # a form too hard to follow: this row fails, and no other
            return torch.zeros_like(allowed)
        if len(answer) < self.least:
            longer = allowed.index_fill(0, torch.tensor(self.ends), False)
            return longer if longer.any() else allowed
        return allowed

    def forced(self, answer: Sequence[int]) -> Forced:
        if self._has_ended(answer):
            return Forced([], [])
        matcher = self.drafts.after(answer)
        if matcher.is_stopped():
            return Forced([], [] if matcher.is_error() else [[end] for end in self.ends[:1]])
        text, sure = matcher.compute_ff_bytes(), matcher.compute_ff_tokens()
        # A token that reaches beyond the forced text is allowed as well where some go on with it.
        rest = text[len(self.tokens.decode_bytes(sure)) :]
        # `":"` may be one token, or its last letter the beginning of the next one.
        parts = [rest], [rest[:-1], rest[-1:]]
        ways = [
            [token for part in each for token in self.tokens.tokenize_bytes(part)] for each in parts
        ]
        if any(token >= self.size for each in (sure, *ways) for token in each):
            return Forced([], [])
        return Forced(sure, [way for n, way in enumerate(ways) if way and way not in ways[:n]])

    def legal(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        if self._has_ended(answer):
            return 0
        return self.drafts.after(answer).validate_tokens(list(tokens))

    def _has_ended(self, answer: Sequence[int]) -> bool:
        """Whether an answer has its end, which a matcher may not read: it could not go back."""
        return bool(answer) and answer[-1] in self.ends
