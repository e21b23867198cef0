"""Requests to an OpenAI-compatible server, sent again while it is busy or away."""

import logging
import math
import os
import random
import time
from json import JSONDecodeError
from threading import Event
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema

from drafthead.heads.errors import UserError

logger = logging.getLogger(__name__)

AGAIN = (408, 429, 500, 502, 503, 504)  # statuses that may be gone soon
PAUSES = (1, 2, 4, 8, 15, 30, 60, 60)  # seconds until a request is sent again, with some chance
SECONDS = (10, 3600)  # to connect, and for an answer: a busy server lets requests wait
KEY = "OPENAI_API_KEY"


class RefusedRequestError(UserError):
    """A request that the server can never answer."""


class BusyError(UserError):
    """No answer this time, which may be another one later."""

    def __init__(self, message: str, seconds: float = 0.0):
        """`seconds`: after which the server wants to be asked again."""
        super().__init__(message)
        self.seconds = seconds


class Connection:
    """Requests to one server."""

    def __init__(self, url: str):
        """`url` with or without /v1 at its end. Nothing is sent yet."""
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.session = requests.Session()
        self.closed = Event()  # nothing is sent again from then on
        self._logged = -math.inf  # when the log last warned of a busy server
        if key := os.environ.get(KEY):
            self.session.headers["Authorization"] = f"Bearer {key}"

    def allow(self, at_once: int) -> None:
        """Prepare for so many requests at a time."""
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=at_once))

    def send_until_answered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As `send`, but again after each of PAUSES while the server is busy or away."""
        for pause in PAUSES:
            try:
                return self.send(path, body)
            except BusyError as error:
                if time.monotonic() > self._logged + 60:  # many requests find out at the same time
                    self._logged = time.monotonic()
                    logger.warning("%s; trying again for some minutes", error)
                # Not all of them at the same moment.
                self.closed.wait(max(error.seconds, pause * random.uniform(0.5, 1.5)))
                if self.closed.is_set():
                    raise
        return self.send(path, body)

    def send(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers to a GET, or to a POST of `body`.

        Raises BusyError where it may answer later, RefusedRequestError for a request that is wrong
        in itself, and UserError for all else.
        """
        method, url = "GET" if body is None else "POST", f"{self.url}/{path}"
        try:
            response = self.session.request(method, url, json=body, timeout=SECONDS)
        except (InvalidSchema, InvalidURL, MissingSchema) as error:
            raise UserError(
                f"{self.url} is no address of a server: write --server http://HOST:PORT"
            ) from error
        except requests.RequestException as error:
            raise BusyError(
                f"no answer from {url} ({reason_of(error)}): start the server, or correct --server"
            ) from error
        if not response.ok:
            raise refusal(response)
        try:
            content = response.json()
        except JSONDecodeError as error:
            raise UserError(f"{url} does not answer with JSON: correct --server") from error
        if not isinstance(content, dict):
            raise UserError(f"{url} does not answer with a JSON object: correct --server")
        return content


def refusal(response: requests.Response) -> UserError:
    """What a status means that is not about success."""
    status, message, url = response.status_code, message_of(response), response.url
    if status in (401, 403):
        return UserError(f"{url} wants a key ({message}): set {KEY} in the environment")
    if status == 404:
        return UserError(f"{url} was not found ({message}): correct --server or --server-model")
    if status in AGAIN:
        wait = response.headers.get("Retry-After", "")
        sentence = f"{url} is busy ({status}: {message}): give the same command again later"
        return BusyError(sentence, min(float(wait), PAUSES[-1]) if wait.isdigit() else 0.0)
    return RefusedRequestError(f"{url} refuses the request ({status}: {message})")


def reason_of(error: requests.RequestException) -> str:
    """Why there was no answer, in few words."""
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
    """What a server says of an error: OpenAI's form, or the beginning of its text."""
    try:
        content = response.json()
        error = content.get("error", content)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = response.text
    return " ".join(str(message).split())[:200] or response.reason
