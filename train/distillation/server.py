"""A target on OpenAI-compatible servers: prompts go there as token ids, and so answers come.

vLLM returns the ids of an answer on request (`return_token_ids`). Of another server's answer the
text is encoded again, which may give other tokens; such answers are marked.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.infer.request.stopping import FinishReason
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.train.distillation.answer_source import EncodedAnswer, Questions, without_repetition
from drafthead.train.distillation.connection import (
    PENALTY,
    UNFILTERED,
    RefusedRequestError,
    choice_of,
)
from drafthead.train.distillation.server_pool import TEXT, PooledServer, ServerPool
from drafthead.train.settings import DistillSettings


class ServerSource:
    """A target on one server or several, of which only the tokenizer is here."""

    vocab_size: int | None = None  # nobody can see it

    def __init__(
        self,
        servers: Sequence[PooledServer],
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        repetition_penalty: float = 1.0,
    ):
        """The tokenizer, the end tokens and the penalty must be those of the model served.

        Raises UserError if no server is there, and for servers of two models.
        """
        self.pool = ServerPool(servers, tokenizer(TEXT, verbose=False)["input_ids"])
        self.model = self.pool.known.model
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.max_length, self.repetition_penalty = self.model.max_length, repetition_penalty

    @property
    def ahead(self) -> int:
        """The number of questions that the servers take together: none waits for the others."""
        return self.pool.at_once

    def weights(self) -> None:
        """Nobody can see the weights of a server."""
        return

    def answers(self, questions: Questions, settings: DistillSettings) -> Iterator[Answer]:
        """The answers, in the order in which they come."""
        return self.pool.answers(questions, lambda one, asked: self.ask(one, asked, settings))

    def ask(
        self, server: PooledServer, question: ServeRequest, settings: DistillSettings
    ) -> Answer:
        """The answer of a server to one question, or why it cannot give it.

        Raises AwayError when there is no answer now, UserError for one that is none.
        """
        prompt, limit = cast(list[int], question.prompt), settings.max_new_tokens
        if self.max_length is not None:
            limit = min(limit, self.max_length - len(prompt))
        body = {
            "model": self.model.name,
            "prompt": prompt,
            "max_tokens": limit,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": question.seed,
            "stop_token_ids": sorted(self.end_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            PENALTY: self.repetition_penalty,
            **UNFILTERED,
        }
        try:
            content = server.connection.send("completions", body)
        except RefusedRequestError as error:
            return Answer(question.id, error=str(error))
        return self._read(server.url, question, prompt, content, settings)

    def _read(
        self,
        url: str,
        question: ServeRequest,
        prompt: list[int],
        content: dict[str, Any],
        settings: DistillSettings,
    ) -> Answer:
        """Return what the server has answered, as token ids, and ended where it repeats itself."""
        choice = choice_of(content, url)
        text, ids = str(choice["text"]), choice.get("token_ids")
        kind = Answer if ids is not None else EncodedAnswer
        if ids is None:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            self._check(url, choice, prompt, ids)
        ids = list(ids)
        if choice["finish_reason"] == "stop" and not self.end_ids.intersection(ids[-1:]):
            ids += self._shown_end()
        if not ids:
            raise UserError(f"{url}/completions gave an answer without a token")
        kept = without_repetition(prompt, ids) if settings.end_repetition else ids
        reason: FinishReason = "stopping_criteria" if len(kept) < len(ids) else "length"
        if kept[-1] in self.end_ids:
            reason = "end_token"
        return kind(question.id, kept, text, reason)

    def _check(self, url: str, choice: dict[str, Any], prompt: list[int], ids: list[int]) -> None:
        """Raise UserError unless the server reads and writes the tokens of the tokenizer here."""
        read = choice.get("prompt_token_ids")
        shown = ids[:-1] if self.end_ids.intersection(ids[-1:]) else ids
        written = str(self.tokenizer.decode(shown, clean_up_tokenization_spaces=False))
        if read not in (None, prompt) or letters(written) != letters(str(choice["text"])):
            raise UserError(
                f"{self.model.name} on {url} has other tokens than "
                f"{self.tokenizer.name_or_path}: give the --target that is served, or another "
                "--server-model"
            )

    def _shown_end(self) -> list[int]:
        """The end token of an answer that the server has ended without showing how."""
        usual = self.tokenizer.eos_token_id
        return [usual] if usual in self.end_ids else sorted(self.end_ids)[:1]


def letters(text: str) -> str:
    """The letters and digits of a text: servers differ in spaces and in cut characters."""
    return "".join(filter(str.isalnum, text))
