"""A target on an OpenAI-compatible server: prompts go there as token ids, and so answers come.

vLLM returns the ids of an answer on request (`return_token_ids`). Of another server's answer the
text is encoded again, which may give other tokens; such answers are marked. Requests are sent again
while the server is busy or away.
"""

import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError
from queue import Queue
from threading import Event, Thread
from typing import Any, cast

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from urllib3 import BaseHTTPResponse, Retry
from urllib3.exceptions import InvalidHeader

from drafthead.core.errors import UserError
from drafthead.core.target.gguf_files import model_folder
from drafthead.infer.request.generation_config import listed, own_settings
from drafthead.infer.request.stopping import FinishReason, token_ids
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.train.distillation.answer_source import EncodedAnswer, Questions, without_repetition
from drafthead.train.distillation.distilled_file import DistillSettings

logger = logging.getLogger(__name__)

AGAIN = (408, 429, 500, 502, 503, 504)  # statuses that may be gone soon
TIMES, BACKOFF, MOST = 8, 1.0, 60  # requests are sent again; seconds: see urllib3's Retry
SECONDS = (10, 3600)  # to connect, and for an answer: a busy server lets requests wait
KEY = "OPENAI_API_KEY"


class RefusedRequestError(UserError):
    """A request that the server can never answer."""


class Patience(Retry):
    """Sends requests again for about three minutes, or when the server asks for it."""

    warned = -math.inf  # when the log last said so: many requests find out at the same time
    closed: Event  # once nobody waits for answers any more

    def new(self, **changes: Any) -> "Patience":
        """The patience that is left for the next time."""
        left = super().new(**changes)
        left.closed = self.closed
        return left

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        """Wait as urllib3 does, until nobody waits for the answer; a warning once a minute.

        Raises UserError when nobody does.
        """
        if time.monotonic() > Patience.warned + 60:
            Patience.warned = time.monotonic()
            last = self.history[-1]
            reason = f"status {last.status}" if last.error is None else reason_of(last.error)
            logger.warning("%s is busy or away (%s); trying for some minutes", last.url, reason)
        if self.closed.wait(self._asked_for(response) or self.get_backoff_time()):
            raise UserError(f"the answer of {self.history[-1].url} is no longer wanted")

    def _asked_for(self, response: BaseHTTPResponse | None) -> float | None:
        """The seconds, or those until a date, that a server asks for; None if it does not say."""
        try:
            return None if response is None else self.get_retry_after(response)
        except InvalidHeader:
            return None


class Connection:
    """Requests to one server."""

    def __init__(self, url: str):
        """`url` with or without /v1 at its end. Nothing is sent yet."""
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.session = requests.Session()
        self.closed = Event()  # of the completions that `allow` prepared last
        if key := os.environ.get(KEY):
            self.session.headers["Authorization"] = f"Bearer {key}"
        # Of each request that is sent again.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)

    def allow(self, at_once: int) -> None:
        """Prepare for so many completions at a time, and send them again as `Patience` does.

        Until `closed` is set: then those that wait to be sent again end.
        """
        patience = Patience(
            TIMES,
            allowed_methods=None,
            status_forcelist=AGAIN,
            backoff_factor=BACKOFF,
            backoff_jitter=5 * BACKOFF,  # not all of them at the same moment
            backoff_max=MOST,
            retry_after_max=MOST,
            raise_on_status=False,
        )
        self.closed = patience.closed = Event()
        adapter = HTTPAdapter(pool_maxsize=at_once, max_retries=patience)
        self.session.mount(f"{self.url}/completions", adapter)

    def send(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers to a GET, or to a POST of `body`.

        Raises RefusedRequestError for a request that is wrong in itself, UserError for all else.
        """
        method, url = "GET" if body is None else "POST", f"{self.url}/{path}"
        try:
            response = self.session.request(method, url, json=body, timeout=SECONDS)
        except (InvalidSchema, InvalidURL, MissingSchema) as error:
            raise UserError(
                f"{self.url} is no address of a server: write http://HOST:PORT"
            ) from error
        except requests.RequestException as error:
            raise UserError(
                f"no answer from {url} ({reason_of(error)}): start the server, or correct the "
                "address"
            ) from error
        if not response.ok:
            raise refusal(response)
        try:
            content = response.json()
        except JSONDecodeError as error:
            raise UserError(f"{url} does not answer with JSON: correct the address") from error
        if not isinstance(content, dict):
            raise UserError(f"{url} does not answer with a JSON object: correct the address")
        return content


def refusal(response: requests.Response) -> UserError:
    """Return what a status means that is not about success."""
    status, message, url = response.status_code, message_of(response), response.url
    if status in (401, 403):
        return UserError(f"{url} wants a key ({message}): set {KEY} in the environment")
    if status == 404:
        return UserError(f"{url} was not found ({message}): correct the address or --server-model")
    if status in AGAIN:
        return UserError(f"{url} is busy ({status}: {message}): give the same command again later")
    return RefusedRequestError(f"{url} refuses the request ({status}: {message})")


def reason_of(error: Exception) -> str:
    """Say why there was no answer, in few words."""
    text = str(error)
    known = (
        "connection refused",
        "connection reset",
        "remote end closed connection",
        "timed out",
        "name or service not known",
    )
    return next((words for words in known if words in text.lower()), text.splitlines()[0])


def message_of(response: requests.Response) -> str:
    """Return what a server says of an error: OpenAI's form, or the beginning of its text."""
    try:
        content = response.json()
        error = content.get("error", content)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = response.text
    return " ".join(str(message).split())[:200] or response.reason


# Filters that some servers take from the model's own files, switched off as they are here.
UNFILTERED = {"top_k": -1, "min_p": 0.0}
PENALTY = "repetition_penalty"  # servers take it from there as well, and a request can set it


@dataclass(frozen=True)
class ServedModel:
    """A model on a server, as the server lists it."""

    name: str
    max_length: int | None  # of prompt and answer in tokens, where the server says it


def find_model(connection: Connection, name: str | None, target: str) -> ServedModel:
    """The model called `name` or, without a name, the one called as the target, or the only one.

    Raises UserError, with the names that there are, when it is not clear which one is meant.
    """
    listed = connection.send("models").get("data")
    models = {m["id"]: m for m in listed if "id" in m} if isinstance(listed, list) else {}
    names = ", ".join(models) or "no model"
    if name is None:
        if target not in models and len(models) != 1:
            raise UserError(f"{connection.url} serves {names}: choose one with --server-model")
        name = target if target in models else next(iter(models))
    if name not in models:
        raise UserError(f"{connection.url} serves {names}, not {name}: correct --server-model")
    return ServedModel(name, models[name].get("max_model_len"))


def stored_penalty(target: str) -> float:
    """The repetition penalty in the generation config of a model's files, which answers have.

    Logs what else answers of a target in this process would have, and a server does not know.
    """
    try:
        config = GenerationConfig.from_pretrained(model_folder(target))
    except (OSError, ValueError):  # no such file
        return 1.0
    own = own_settings(config)
    penalty = float(own.pop(PENALTY, 1.0))
    if own:
        logger.warning(
            "not asked of the server, though the generation config of %s says so: %s",
            target,
            listed(own),
        )
    return penalty


def stored_end_ids(target: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end answers, as the files of a model give them, without its weights.

    Where they give none it is the tokenizer's own.
    """
    folder = model_folder(target)
    for kind in (GenerationConfig, AutoConfig):
        try:
            ends = kind.from_pretrained(folder).eos_token_id
        except (OSError, ValueError, AttributeError):  # no such file, or nothing about ends
            continue
        if ends is not None:
            return token_ids(ends)
    return frozenset([tokenizer.eos_token_id]) - {None}


class ServerSource:
    """A target on a server, of which only the tokenizer is here."""

    vocab_size: int | None = None  # nobody can see it

    def __init__(
        self,
        connection: Connection,
        model: ServedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        repetition_penalty: float = 1.0,
    ):
        """The tokenizer, the end tokens and the penalty must be those of the model served."""
        self.connection, self.model = connection, model
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.max_length, self.repetition_penalty = model.max_length, repetition_penalty

    def weights(self) -> None:
        """Nobody can see the weights of a server."""
        return

    def answers(self, questions: Questions, settings: DistillSettings) -> Iterator[Answer]:
        """The answers, in the order in which they come."""
        self.connection.allow(settings.batch_size)
        given: Queue[Answer | Exception | None] = Queue()
        closed = self.connection.closed

        def work() -> None:
            """Ask one question after the other, until there are no more."""
            while (question := questions.get()) is not None and not closed.is_set():
                assert isinstance(question, ServeRequest)
                try:
                    given.put(self.ask(question, settings))
                except Exception as error:  # is raised where the answers are read
                    given.put(error)
            questions.put(None)  # for the others
            given.put(None)

        # Daemons: Ctrl-C need not wait for answers that are still on their way.
        for _ in range(settings.batch_size):
            Thread(target=work, daemon=True).start()
        try:
            for _ in range(settings.batch_size):
                while (answer := given.get()) is not None:
                    if isinstance(answer, Exception):
                        raise answer
                    yield answer
        finally:
            closed.set()
            questions.put(None)

    def ask(self, question: ServeRequest, settings: DistillSettings) -> Answer:
        """The answer to one question, or why the server cannot give it.

        Raises UserError when there is no answer at all.
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
            content = self.connection.send("completions", body)
        except RefusedRequestError as error:
            return Answer(question.id, error=str(error))
        return self._read(question, prompt, content, settings)

    def _read(
        self,
        question: ServeRequest,
        prompt: list[int],
        content: dict[str, Any],
        settings: DistillSettings,
    ) -> Answer:
        """Return what the server has answered, as token ids, and ended where it repeats itself."""
        choice = choice_of(content, self.connection.url)
        text, ids = str(choice["text"]), choice.get("token_ids")
        kind = Answer if ids is not None else EncodedAnswer
        if ids is None:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            self._check(choice, prompt, ids)
        ids = list(ids)
        if choice["finish_reason"] == "stop" and not self.end_ids.intersection(ids[-1:]):
            ids += self._shown_end()
        if not ids:
            raise UserError(f"{self.connection.url}/completions gave an answer without a token")
        kept = without_repetition(prompt, ids) if settings.end_repetition else ids
        reason: FinishReason = "stopping_criteria" if len(kept) < len(ids) else "length"
        if kept[-1] in self.end_ids:
            reason = "end_token"
        return kind(question.id, kept, text, reason)

    def _check(self, choice: dict[str, Any], prompt: list[int], ids: list[int]) -> None:
        """Raise UserError unless the server reads and writes the tokens of the tokenizer here."""
        read = choice.get("prompt_token_ids")
        shown = ids[:-1] if self.end_ids.intersection(ids[-1:]) else ids
        written = str(self.tokenizer.decode(shown, clean_up_tokenization_spaces=False))
        if read not in (None, prompt) or letters(written) != letters(str(choice["text"])):
            raise UserError(
                f"{self.model.name} on {self.connection.url} has other tokens than "
                f"{self.tokenizer.name_or_path}: give the --target that is served, or another "
                "--server-model"
            )

    def _shown_end(self) -> list[int]:
        """The end token of an answer that the server has ended without showing how."""
        usual = self.tokenizer.eos_token_id
        return [usual] if usual in self.end_ids else sorted(self.end_ids)[:1]


def choice_of(content: dict[str, Any], url: str) -> dict[str, Any]:
    """The answer in what a server has sent; UserError that names what is missing in it."""
    try:
        choice = content["choices"][0]
        choice["message" if "message" in choice else "text"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{url}/completions does not answer as OpenAI's does ({error!r}): correct the address"
        ) from error
    return cast(dict[str, Any], choice)


def letters(text: str) -> str:
    """The letters and digits of a text: servers differ in spaces and in cut characters."""
    return "".join(filter(str.isalnum, text))
