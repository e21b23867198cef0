"""A model on an OpenAI-compatible server, and requests to it."""

import logging
import os
import socket
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any, cast

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from urllib3 import PoolManager, Retry
from urllib3.exceptions import InvalidHeader

from drafthead.core.errors import UserError
from drafthead.core.target.gguf_files import model_folder
from drafthead.infer.request.generation_config import listed, own_settings
from drafthead.infer.request.stopping import token_ids

logger = logging.getLogger(__name__)

AGAIN = (408, 429, 500, 502, 503, 504)  # statuses that may be gone soon
TIMES, BACKOFF, MOST = 8, 1.0, 60.0  # until a server counts as gone; seconds between, doubled
MOST_AT_ONCE = 1024  # requests to one server
SECONDS = (10, 3600)  # to connect, and for an answer: a busy server lets requests wait
KEY = "OPENAI_API_KEY"


class RefusedRequestError(UserError):
    """A request that the server can never answer."""


class AwayError(UserError):
    """No answer now; another server has one, or this one later."""

    def __init__(self, sentence: str, reason: str, seconds: float | None = None):
        """`reason` in few words; `seconds` that the server asks to wait, where it does."""
        super().__init__(sentence)
        self.reason, self.seconds = reason, seconds


class KeptAlive(HTTPAdapter):
    """Connections that notice within a minute that a machine is gone."""

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False) -> None:  # type: ignore[override]
        """Have each connection probe the other side."""
        probes = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *((socket.IPPROTO_TCP, name, value) for name, value in probes),
        ]
        self.poolmanager = PoolManager(
            connections, maxsize=maxsize, block=block, socket_options=options
        )


class ServerConnection:
    """Requests to one server."""

    def __init__(self, url: str):
        """`url` with or without /v1 at its end. Nothing is sent yet."""
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.session = requests.Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, KeptAlive(pool_maxsize=MOST_AT_ONCE))
        if key := os.environ.get(KEY):
            self.session.headers["Authorization"] = f"Bearer {key}"

    def be_patient(self) -> None:
        """Send each request again for about three minutes, or when the server asks for it."""
        # Of each request that is sent again.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        patience = Retry(
            TIMES,
            allowed_methods=None,
            status_forcelist=AGAIN,
            backoff_factor=BACKOFF,
            backoff_max=MOST,
            retry_after_max=int(MOST),
            raise_on_status=False,
        )
        self.session.mount(self.url, HTTPAdapter(max_retries=patience))

    def send(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers to a GET, or to a POST of `body`.

        Raises RefusedRequestError for a request that is wrong in itself, AwayError where there is
        no answer now, UserError for all else.
        """
        method, url = "GET" if body is None else "POST", f"{self.url}/{path}"
        try:
            response = self.session.request(method, url, json=body, timeout=SECONDS)
        except (InvalidSchema, InvalidURL, MissingSchema) as error:
            raise UserError(
                f"{self.url} is not the address of a server: write http://HOST:PORT"
            ) from error
        except requests.RequestException as error:
            reason = reason_of(error)
            raise AwayError(
                f"no answer from {url} ({reason}): start the server, or correct the address", reason
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
        sentence = f"{url} is busy ({status}: {message}): run the same command again later"
        return AwayError(sentence, f"status {status}", asked_for(response))
    return RefusedRequestError(f"{url} refuses the request ({status}: {message})")


def asked_for(response: requests.Response) -> float | None:
    """The seconds, or those until a date, that a server asks to wait; None if it does not say."""
    try:
        return Retry().parse_retry_after(response.headers.get("Retry-After", ""))
    except InvalidHeader:
        return None


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


def find_model(connection: ServerConnection, name: str | None, target: str) -> ServedModel:
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
