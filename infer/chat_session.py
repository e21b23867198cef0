"""A conversation that keeps the caches of earlier turns."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.target.weight_state import state_of
from drafthead.infer.answers.results import DecodeResult, Stream, TextStream
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.loop import Decoding
from drafthead.infer.request.text_pieces import text_pieces, texts_of
from drafthead.infer.scheduling.method import Method
from drafthead.infer.scheduling.past import Past

Message: TypeAlias = dict[str, str]
# The run of a conversation so far, and how it is decoded.
Begin: TypeAlias = Callable[[Sequence[Message]], tuple[BatchRun, Method]]


class ChatSession:
    """A conversation with the target: `say` returns an answer, `stream` its pieces.

    Each answer equals that of `generate` for `messages`, but only the new part of the conversation
    is read. Do not share a session between threads.
    """

    def __init__(
        self,
        begin: Begin,
        result: Callable[[BatchRun], DecodeResult],
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
    ):
        """`result` makes of a run what `Decoder.generate` returns."""
        self.begin, self.result, self.tokenizer = begin, result, tokenizer
        self.messages: list[Message] = list(messages)
        self.reused = 0  # positions of the last prompt that were not read again
        self.prompt: Sequence[int] = ()  # of the last turn
        self.past: Past | None = None
        self.state: Any = None  # of the weights, when the last turn began
        self.method: Method | None = None

    def say(self, text: str) -> str:
        """The answer to a message of the user; both are appended to `messages`."""
        for _ in self.stream(text):
            pass
        return self.messages[-1]["content"]

    def stream(self, text: str) -> TextStream:
        """The answer piece by piece. An answer that is not read to its end stays as it is then."""
        passes, run = self._passes(text)
        return Stream(self._pieces(passes), run.stats, lambda: self.result(run))

    def steps(self, text: str) -> Stream[list[int]]:
        """The answer as the new tokens of each pass: the drafts that it accepted and, last, the
        target's own token. An answer that is not read to its end stays as it is then.
        """
        passes, run = self._passes(text)
        return Stream(passes, run.stats, lambda: self.result(run))

    def _passes(self, text: str) -> tuple[Generator[list[int], None, None], BatchRun]:
        """The new tokens of each pass of the answer to a message, and its run."""
        messages = [*self.messages, {"role": "user", "content": text}]
        run, method = self.begin(messages)
        self.method = self.method or method
        [self.prompt] = run.request.prompts
        return self._decoded(run, self.method, messages), run

    def _pieces(self, passes: Generator[list[int], None, None]) -> Iterator[str]:
        try:
            yield from text_pieces(passes, self.tokenizer, self.prompt)
        finally:
            passes.close()

    def _decoded(
        self, run: BatchRun, method: Method, messages: Sequence[Message]
    ) -> Generator[list[int], None, None]:
        """The new tokens of each pass of the answer to `messages`; then the turn is kept."""
        past, self.past = self.past, None
        before, self.state = self.state, state_of(method.target.model)
        is_known = past is not None and self.state == before
        kept = past.reusable(run.request.prompts) if past is not None and is_known else 0
        if past is not None and kept:
            past.cut(kept)
            decoding = method.decoding(run, lambda: past)
        else:
            decoding = method.decoding(run)
        try:
            for emitted in decoding:
                self.reused = run.stats.reused
                yield emitted[0]
        except GeneratorExit:  # between two passes: the caches are whole
            self._keep(decoding, messages)
            raise
        self._keep(decoding, messages)

    def _keep(self, decoding: Decoding, messages: Sequence[Message]) -> None:
        """Remember the answer to `messages` and what was read for it."""
        run = decoding.run
        prompt, answer = run.request.prompts[0], run.rows[0].tokens
        tokens = [*prompt, *answer]
        self.past = Past(decoding.stepper.cache, decoding.session, tokens, drafter=decoding.drafter)
        text = texts_of([answer], self.tokenizer, after=[prompt])[0]
        self.messages = [*messages, {"role": "assistant", "content": text}]
