"""The endpoints: OpenAI's and vLLM's, and a page to chat with."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import signal
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.serve import responses
from drafthead.serve.connections import Connection, most_connections
from drafthead.serve.decode_loop import DecodeLoop, Inbox
from drafthead.serve.errors import ApiError, error_body, not_supported
from drafthead.serve.items import ItemsResponse, ResponsesRequest
from drafthead.serve.json_grammar import JsonGrammars
from drafthead.serve.limits import Limits, longest_token
from drafthead.serve.metrics import Metrics
from drafthead.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DraftsRequest,
    Reader,
    TextRequest,
    TokensRequest,
    sampling_of,
)
from drafthead.serve.recording import Recorder
from drafthead.serve.server_options import ServerOptions

OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/favicon.ico")  # without a key
REQUEST_ID = re.compile(r"[!-~]{1,128}")  # that a client may give; another one is replaced
# What browsers are told: run nothing, show nothing within another page, guess no types.
CAREFUL = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
READERS = 8  # threads that tokenise; while they do, others can work
BODY_SECONDS = 60.0  # in which the body of a request has to follow its headers
logger = logging.getLogger(__name__)
GONE = 499  # nginx's status of a client that has not waited for the answer
Found = TypeVar("Found")


def refusal(options: ServerOptions, scope: Scope) -> ApiError | None:
    """Why a request is refused before it is read."""
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    # Others can make a name with a dot lead here, for a page in a browser of this machine.
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    own_names = {*map(str.lower, options.allowed_hosts)}
    known = "." not in name or is_address(name) or {name.lower(), "*"} & own_names
    if not known:
        return ApiError(403, f"{name} is not a name of this server: see --allowed-host")
    asking = {origin, "*"} & {*options.cors_origins}
    if origin is not None and not asking and urlsplit(origin).netloc != host:
        return ApiError(403, "pages of this origin may not ask: see --cors-origin")
    scheme, _, given = headers.get("authorization", "").partition(" ")
    key = given.strip().encode("latin-1")
    is_right = any([hmac.compare_digest(key, own.encode()) for own in options.api_keys])
    needs_key = bool(options.api_keys) and scope["path"] not in OPEN_PATHS
    if needs_key and not (scheme.lower() == "bearer" and is_right):
        return ApiError(401, "the API key is missing or wrong")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > options.max_body:
        return too_long(options)
    return None


def too_long(options: ServerOptions) -> ApiError:
    """The error of a request that has too many bytes."""
    return ApiError(413, f"the request has more than {options.max_body} bytes")


def is_address(name: str) -> bool:
    """Whether the host of a URL is an IP address, and no name."""
    with suppress(ValueError):
        return bool(ip_address(name.strip("[]")))
    return False


class Gate:
    """Refuses requests that may not be asked, and adds headers that keep browsers careful.

    Each request has an id, the client's `X-Request-Id` or a new one, and a line in the log.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self.app, self.options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer with its error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        given, began = Headers(scope=scope).get("x-request-id", ""), time.monotonic()
        id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        status = GONE

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
        finally:
            if scope["path"] not in OPEN_PATHS:
                answer = scope.get("state", {}).get("answer")
                used = "" if answer is None else f", {answer.account()}"
                line = id, scope["method"], scope["path"], status, time.monotonic() - began, used
                logger.info("%s: %s %s %d in %.2f s%s", *line)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that may be asked, up to its limits; answer another with its error."""
        if (error := refusal(self.options, scope)) is not None:
            return await answer_to(error)(scope, receive, send)
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


class Server:
    """One decoder, the thread that runs it, and what is known of the model."""

    def __init__(self, decoder: Decoder, options: ServerOptions):
        """Raises UserError for a target whose answers cannot be texts in pieces."""
        if decoder.tokenizer is None or not decoder.tokenizer.is_fast:
            raise UserError("a server needs a target with a fast tokenizer")
        decoder.target.refuse_encoder("serve")
        self.decoder, self.options, self.tokenizer = decoder, options, decoder.tokenizer
        lengths = [each for each in (options.max_length, decoder.max_length) if each]
        self.max_length = min(lengths, default=1 << 20)
        self.metrics = Metrics(options.model_name)
        decoder.memory.most_kept = options.max_batch if options.prefix_cache else 0
        self.started = int(time.time())
        self.loop = DecodeLoop(decoder, self.metrics, options.max_batch, options.max_queue)
        decoder.memory.most_bytes = options.max_kept << 20
        sampling = sampling_of(decoder.target.model) if options.model_sampling else {}
        grammars = JsonGrammars(decoder)
        self.reader = Reader(decoder, self.metrics, self.max_length, grammars, sampling)
        if options.record is not None:
            most = options.max_record << 20
            self.loop.recorder = Recorder(options.record, most, decoder, options.target)
        self.limits = Limits(self.max_length, longest_token(self.tokenizer.get_vocab()))
        # Several: one long text must not hold up the others. Fast tokenizers only read here.
        self.reading = ThreadPoolExecutor(READERS, thread_name_prefix="reading")
        # One, of its own: schemas may take long to compile.
        self.forming = ThreadPoolExecutor(1, thread_name_prefix="forming")

    async def read(self, function: Callable[[], Found], has_form: bool = False) -> Found:
        """What a function that tokenises, or compiles a form, returns, beside the event loop."""
        threads = self.forming if has_form else self.reading
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    @property
    def is_ready(self) -> bool:
        """Whether one more answer can be asked for."""
        return self.loop.thread.is_alive() and not self.loop.stopping and not self.loop.is_full

    def draft_with(self, draft: str | list[str]) -> Decoder:
        """The decoder with other drafts, which decodes requests from now on."""
        decoder = self.decoder.with_drafts(draft)
        self.decoder, self.reader = decoder, replace(self.reader, decoder=decoder)
        self.loop.go_on_with(decoder)
        return decoder

    async def answer(
        self,
        asked: ChatRequest | CompletionRequest,
        request: Request,
        items: ResponsesRequest | None = None,
    ) -> Response | dict[str, Any]:
        """The response to a request for answers; `items` is what a chat was made of."""
        self.refuse_other(asked.model)
        inbox = Inbox()
        jobs = await self.read(lambda: self.reader.jobs(asked, inbox), asked.has_form)
        most = self.options.max_queue + self.options.max_batch
        if len(jobs) > most:
            raise ApiError(400, f"a request may have {most} answers here, not {len(jobs)}", "n")
        made = asked, jobs, self.loop, self.reader, self.options.model_name
        found = responses.Response(*made) if items is None else ItemsResponse(items, *made)
        request.state.answer = found
        found.submit()
        if asked.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(found.stream(), 200, headers, "text/event-stream")
        whole = await unless_gone(request, found.whole())
        return Response(status_code=GONE) if whole is None else whole

    def refuse_other(self, model: str | None) -> None:
        """Raise ApiError 404 for a model that is not the one that is served."""
        name = self.options.model_name
        if model not in (None, name, *self.options.other_names):
            raise ApiError(404, f"there is no model {model}, only {name}", "model")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Found]) -> Found | None:
    """What some work returns; None, and the work is cancelled, when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def make_app(decoder: Decoder, options: ServerOptions) -> FastAPI:
    """The application around a decoder; it decodes from its start to its end.

    Raises UserError for a target whose answers cannot be texts in pieces.
    """
    server = Server(decoder, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.loop.thread.start()
        yield
        await asyncio.to_thread(server.loop.stop)
        if server.loop.recorder is not None:
            server.loop.recorder.close()

    app = FastAPI(
        dependencies=[Depends(server.limits)],
        title="drafthead",
        version=version("drafthead"),
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts of others
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = server
    app.add_middleware(Gate, options=options)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    add_errors(app)
    add_answers(app, server)
    add_facts(app, server)
    return app


def listen(app: FastAPI, host: str, port: int, grace: int) -> None:
    """Answer requests until SIGTERM or Ctrl-C; running answers then have `grace` seconds."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    Connection.most = most_connections()
    uvicorn.run(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=grace,
        access_log=False,
        http=Connection,
        backlog=Connection.most // 2,
    )


def answer_to(error: HTTPException) -> JSONResponse:
    """The response to a request that is refused, or that failed."""
    body = error_body(error.status_code, str(error.detail), getattr(error, "param", None))
    own = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
    headers = {**(error.headers or {}), **own.get(error.status_code, {})}
    return JSONResponse(body, error.status_code, headers)


def add_errors(app: FastAPI) -> None:
    """Errors become OpenAI's JSON."""

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return answer_to(error)

    @app.exception_handler(UserError)
    async def unfit(_: Request, error: UserError) -> JSONResponse:
        return answer_to(ApiError(400, str(error)))

    @app.exception_handler(Exception)  # it is logged with its traceback
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return answer_to(ApiError(500, f"the server failed: {type(error).__name__}"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        """The field that is wrong; of a body that is no JSON object there is none."""
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        if first["type"] == "json_invalid" or not field:
            message = "the body is no JSON object, or Content-Type is not application/json"
            return answer_to(ApiError(400, message))
        if first["type"] == "extra_forbidden":
            return answer_to(not_supported(field))
        return answer_to(ApiError(400, f"{field}: {first['msg']}", field))


def add_answers(app: FastAPI, server: Server) -> None:
    """The endpoints that decode or tokenise."""

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response | dict[str, Any]:
        """The next message of a conversation."""
        return await server.answer(asked, request)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest, request: Request) -> Response | dict[str, Any]:
        """What follows one text or several."""
        return await server.answer(asked, request)

    @app.post("/v1/responses", response_model=None)
    async def respond(asked: ResponsesRequest, request: Request) -> Response | dict[str, Any]:
        """The next items of a conversation."""
        return await server.answer(asked.chat(), request, asked)

    @app.post("/v1/drafts")
    async def load(asked: DraftsRequest) -> dict[str, Any]:
        """Draft with something else from now on; requests at work go on as they began."""
        server.refuse_other(asked.model)
        if not server.options.api_keys:
            raise ApiError(403, "drafts are changed with a key alone: start with --api-key")
        decoder = await asyncio.to_thread(server.draft_with, asked.draft)
        names = [] if decoder.drafter is None else [*decoder.drafter.names]
        return {"draft": asked.draft, "drafters": names}

    @app.post("/tokenize")
    async def tokenize(asked: TextRequest) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        server.refuse_other(asked.model)
        [ids] = await server.read(lambda: asked.prompts(server.decoder))
        return {"tokens": ids, "count": len(ids), "max_model_len": server.max_length}

    @app.post("/detokenize")
    async def detokenize(asked: TokensRequest) -> dict[str, Any]:
        """The text of tokens."""
        server.refuse_other(asked.model)
        server.reader.refuse_unknown(asked.tokens, "tokens")
        return {"prompt": await server.read(lambda: server.tokenizer.decode(asked.tokens))}


def add_facts(app: FastAPI, server: Server) -> None:
    """The endpoints that tell about the server, and the page."""

    def about(name: str) -> dict[str, Any]:
        """The model under one of its names."""
        facts = {"owned_by": "drafthead", "max_model_len": server.max_length}
        return {"id": name, "object": "model", "created": server.started, **facts}

    def get(path: str) -> Any:
        """A route that HEAD may ask for too."""
        return app.api_route(path, methods=["GET", "HEAD"], response_model=None)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served, under each of its names."""
        names = dict.fromkeys([server.options.model_name, *server.options.other_names])
        return {"object": "list", "data": [about(name) for name in names]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of a name."""
        server.refuse_other(name)
        return about(name)

    @get("/health")
    async def health() -> Response:
        """Whether the decoding thread is alive."""
        return Response(status_code=200 if server.loop.thread.is_alive() else 503)

    @get("/ready")
    async def ready() -> Response:
        """Whether one more answer can be asked for; nobody should be sent here else."""
        return Response(status_code=200 if server.is_ready else 503)

    @get("/version")
    async def tell_version() -> dict[str, str]:
        """The version of drafthead."""
        return {"version": version("drafthead")}

    @get("/metrics")
    async def metrics() -> Response:
        """What Prometheus reads."""
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")

    @get("/")
    async def page() -> HTMLResponse:
        """A page to chat with, which runs no script and has no style but its own."""
        facts = {"model": server.options.model_name, "key": bool(server.options.api_keys)}
        text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        text = text.replace("{/*facts*/}", json.dumps(facts).replace("<", "\\u003c"))
        sources = [
            f"{kind}-src 'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'"
            for kind, part in re.findall(r"(?s)<(script|style)>(.*?)</\1>", text)
        ]
        policy = "; ".join([CAREFUL["Content-Security-Policy"], "connect-src 'self'", *sources])
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})
