"""Access to the server: requests are checked before they are read, and logged in a line each."""

import asyncio
import hmac
import logging
import re
import secrets
import time
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafthead.serve.errors import ApiError, error_body
from drafthead.serve.server_options import ServerOptions

DRAFTS = "/v1/drafts"  # for whoever runs the server
OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/favicon.ico")  # without a key
REQUEST_ID = re.compile(r"[!-~]{1,128}")  # that a client may give; another one is replaced
# Headers for browsers: run nothing, show nothing within another page, guess no types.
CAREFUL = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
BODY_SECONDS = 60.0  # in which the body of a request has to follow its headers
GONE = 499  # nginx's status of a client that has not waited for the answer
logger = logging.getLogger(__name__)


def key_of(options: ServerOptions, scope: Scope) -> int | None:
    """The number of the key that a request has brought; None where it needs none.

    Raises ApiError for a request that is refused before it is read.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    # Others can make a name with a dot lead here, for a page in a browser of this machine.
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    own_names = {*map(str.lower, options.allowed_hosts)}
    known = "." not in name or is_address(name) or {name.lower(), "*"} & own_names
    if not known:
        raise ApiError(403, f"{name} is not a name of this server: see --allowed-host")
    asking = {origin, "*"} & {*options.cors_origins}
    if origin is not None and not asking and urlsplit(origin).netloc != host:
        raise ApiError(403, "pages of this origin may not ask: see --cors-origin")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > options.max_body:
        raise too_long(options)
    keys = options.api_keys
    if scope["path"] == DRAFTS:
        keys = options.admin_keys or keys
        if not keys:
            raise ApiError(403, "drafts are for who has a key: start with --admin-key or --api-key")
    if not keys or scope["path"] in OPEN_PATHS:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    key = given.strip().encode("latin-1")
    right = [hmac.compare_digest(key, own.encode()) for own in keys]
    if scheme.lower() != "bearer" or not any(right):
        raise ApiError(401, "the API key is missing or wrong")
    return right.index(True)


def too_long(options: ServerOptions) -> ApiError:
    """The error of a request that has too many bytes."""
    return ApiError(413, f"the request has more than {options.max_body} bytes")


def is_address(name: str) -> bool:
    """Whether the host of a URL is an IP address, and no name."""
    with suppress(ValueError):
        return bool(ip_address(name.strip("[]")))
    return False


def answer_to(error: HTTPException, scope: Scope) -> JSONResponse:
    """The response to a request that is refused, or that failed; its line has the reason."""
    scope["state"]["reason"] = f": {error.detail}"
    own = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
    headers = {**(error.headers or {}), **own.get(error.status_code, {})}
    return JSONResponse(error_body(error), error.status_code, headers)


class Gate:
    """Refuses requests that may not be asked, and adds headers that keep browsers careful.

    Each request has an id, the client's `X-Request-Id` or a new one. A client is whoever has a key,
    or where none is needed an address.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self.app, self.options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer with its error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        given, began = Headers(scope=scope).get("x-request-id", ""), time.monotonic()
        id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        status, address = 0, (scope.get("client") or ["?"])[0]
        state = scope.setdefault("state", {})
        state |= {"client": address, "salt": "", "reason": ""}

        async def careful(message: Message) -> None:
            """Send a part of the response."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = id
                for name, value in CAREFUL.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._let_in(scope, receive, careful)
        except Exception as error:  # it is logged with its traceback where it ends up
            if not status:
                failed = ApiError(500, f"the server failed: {type(error).__name__}")
                await answer_to(failed, scope)(scope, receive, careful)
            raise
        finally:
            status = status or GONE
            if status >= 400 or scope["path"] not in OPEN_PATHS:
                path, used = quote(scope["path"])[:200], state.get("answer")
                about = state["reason"] if used is None else f", {used.account()}{state['reason']}"
                line = address, scope["method"], path, status, time.monotonic() - began, id, about
                logger.info("%s %s %s %d in %.2f s, %s%s", *line)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that may be asked, up to its limits; answer another with its error."""
        try:
            key = key_of(self.options, scope)
        except ApiError as error:
            return await answer_to(error, scope)(scope, receive, send)
        if key is not None:
            scope["state"] |= {"client": f"key {key}", "salt": f"key {key} "}
        seen, is_read, end = 0, False, asyncio.get_running_loop().time() + BODY_SECONDS

        async def counted() -> Message:
            """The next part of the request; raises ApiError 413 for too much, 408 if it is late."""
            nonlocal seen, is_read
            try:
                async with asyncio.timeout_at(None if is_read else end):
                    message = await receive()
            except TimeoutError as error:
                raise ApiError(408, f"no body has come in {BODY_SECONDS:.0f} seconds") from error
            is_read = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self.options.max_body:
                raise too_long(self.options)
            return message

        return await self.app(scope, counted, send)
