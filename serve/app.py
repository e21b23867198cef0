"""The endpoints: OpenAI's and vLLM's, and a page to chat with."""

import asyncio
import hmac
import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drafthead.heads.errors import UserError
from drafthead.infer import Decoder
from drafthead.serve import responses
from drafthead.serve.connections import Connection, most_connections
from drafthead.serve.decode_loop import DecodeLoop, Inbox
from drafthead.serve.errors import ApiError, error_body
from drafthead.serve.json_grammar import JsonGrammars
from drafthead.serve.limits import Limits, longest_token
from drafthead.serve.metrics import Metrics
from drafthead.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Reader,
    TextRequest,
    TokensRequest,
    message_for_template,
    token_ids,
)

OPEN_PATHS = ("/", "/health", "/metrics", "/favicon.ico")  # without a key
READERS = 8  # threads that tokenise; while they do, others can work
BODY_SECONDS = 60.0  # in which the body of a request has to follow its headers
GONE = 499  # nginx's status of a client that has not waited for the answer
Found = TypeVar("Found")


@dataclass(frozen=True)
class ServerOptions:
    """How a server serves."""

    model_name: str
    max_batch: int = 16  # answers that are decoded at a time
    max_queue: int = 256  # answers that may wait
    max_body: int = 4 << 20  # bytes of a request
    max_kept: int = 2048  # MiB that what was read for answers may take, for prompts that go on
    max_length: int | None = None  # tokens of a prompt and its answer; None: the target's context
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()


class Gate:
    """Refuses requests without the key, and those that are too long to be read."""

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self.app, self.options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer with its error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        key, most = self.options.api_key, self.options.max_body
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        too_long = f"the request has more than {most} bytes"
        if key and scope["path"] not in OPEN_PATHS and not hmac.compare_digest(given, key.encode()):
            refusal = error_body(401, "the API key is missing or wrong")
            return await JSONResponse(refusal, 401)(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            return await JSONResponse(error_body(413, too_long), 413)(scope, receive, send)
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
            if seen > most:
                raise ApiError(413, too_long)
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
        decoder.memory.most_kept = options.max_batch
        self.loop = DecodeLoop(decoder, self.metrics, options.max_batch, options.max_queue)
        decoder.memory.most_bytes = options.max_kept << 20
        self.reader = Reader(decoder, self.metrics, self.max_length, JsonGrammars(decoder))
        self.limits = Limits(self.max_length, longest_token(self.tokenizer.get_vocab()))
        # Several: one long text must not hold up the others. Fast tokenizers only read here.
        self.reading = ThreadPoolExecutor(READERS, thread_name_prefix="reading")
        # One, of its own: schemas may take long to compile.
        self.forming = ThreadPoolExecutor(1, thread_name_prefix="forming")

    async def read(self, function: Callable[[], Found], has_form: bool = False) -> Found:
        """What a function that tokenises, or compiles a form, returns, beside the event loop."""
        threads = self.forming if has_form else self.reading
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    async def answer(
        self, asked: ChatRequest | CompletionRequest, request: Request
    ) -> Response | dict[str, Any]:
        """The response to a request for answers."""
        if asked.model not in (None, self.options.model_name):
            raise ApiError(
                404, f"there is no model {asked.model}, only {self.options.model_name}", "model"
            )
        inbox = Inbox()
        jobs = await self.read(lambda: self.reader.jobs(asked, inbox), bool(asked.response_format))
        found = responses.Response(asked, jobs, self.loop, self.tokenizer, self.options.model_name)
        self.loop.submit(jobs)
        if asked.stream:
            return StreamingResponse(found.stream(), media_type="text/event-stream")
        whole = await unless_gone(request, found.whole())
        return Response(status_code=GONE) if whole is None else whole


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

    costs = [Depends(server.limits)]
    app = FastAPI(
        title="drafthead", version=version("drafthead"), lifespan=lifespan, dependencies=costs
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
        backlog=Connection.most,
    )


def add_errors(app: FastAPI) -> None:
    """Errors become OpenAI's JSON."""

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        param = getattr(error, "param", None)
        headers = {"Retry-After": "1"} if error.status_code == 429 else None
        body = error_body(error.status_code, str(error.detail), param)
        return JSONResponse(body, error.status_code, headers)

    @app.exception_handler(UserError)
    async def unfit(_: Request, error: UserError) -> JSONResponse:
        return JSONResponse(error_body(400, str(error)), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        """The field that is wrong; of a body that is no JSON object there is none."""
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        if first["type"] == "json_invalid" or not field:
            message = "the body is no JSON object, or Content-Type is not application/json"
            return JSONResponse(error_body(400, message), 400)
        return JSONResponse(error_body(400, f"{field}: {first['msg']}", field), 400)


def add_answers(app: FastAPI, server: Server) -> None:
    """The endpoints that decode or tokenise."""

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response | dict[str, Any]:
        """The next message of a conversation."""
        if not server.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        return await server.answer(asked, request)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest, request: Request) -> Response | dict[str, Any]:
        """What follows one text or several."""
        return await server.answer(asked, request)

    @app.post("/tokenize")
    async def tokenize(asked: TextRequest) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        if asked.messages is not None:
            chat = ChatRequest(messages=[*map(message_for_template, asked.messages)])
            [ids] = await server.read(lambda: chat.prompts(server.decoder))
        else:
            ids = await server.read(lambda: token_ids(asked.prompt or "", server.decoder))
        return {"tokens": ids, "count": len(ids), "max_model_len": server.max_length}

    @app.post("/detokenize")
    async def detokenize(asked: TokensRequest) -> dict[str, Any]:
        """The text of tokens."""
        return {"prompt": await server.read(lambda: server.tokenizer.decode(asked.tokens))}


def add_facts(app: FastAPI, server: Server) -> None:
    """The endpoints that tell about the server, and the page."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        about = {"id": server.options.model_name, "object": "model", "owned_by": "drafthead"}
        return {
            "object": "list",
            "data": [{**about, "created": 0, "max_model_len": server.max_length}],
        }

    @app.get("/health")
    async def health() -> Response:
        """Whether the decoding thread is alive."""
        return Response(status_code=200 if server.loop.thread.is_alive() else 503)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        """The version of drafthead."""
        return {"version": version("drafthead")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """What Prometheus reads."""
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        """A page to chat with."""
        facts = {"model": server.options.model_name, "key": bool(server.options.api_key)}
        text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return text.replace("{/*facts*/}", json.dumps(facts).replace("<", "\\u003c"))
