"""The endpoints: OpenAI's and vLLM's, and a page to chat with."""

import asyncio
import json
import logging
import re
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from drafthead.core.errors import UserError
from drafthead.core.storage.files import plain_path
from drafthead.infer import Decoder
from drafthead.infer.loading.loaded import described, path_of
from drafthead.serve import responses
from drafthead.serve.decode_loop import DecodeLoop, Inbox
from drafthead.serve.errors import ApiError
from drafthead.serve.gate import CAREFUL, DRAFTS, GONE, Gate, answer_to
from drafthead.serve.items import ItemsResponse, ResponsesRequest
from drafthead.serve.json_grammar import JsonGrammars
from drafthead.serve.large_bodies import LargeBodies
from drafthead.serve.limits import Limits, longest_token
from drafthead.serve.metrics import Metrics
from drafthead.serve.protocol import (
    Body,
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
from drafthead.serve.waiting import Queue, Threads

# Threads that read and tokenise: for one client, who gains nothing from more as they take turns,
# and beside them for others, each of whom has one at once.
READERS, OTHER_READERS = 2, 6
logger = logging.getLogger(__name__)
Asked = TypeVar("Asked", bound=Body)
Work = Callable[[Asked, Request], Awaitable[Response]]


class Server:
    """One decoder, the thread that runs it, and what is known of the model."""

    def __init__(self, decoder: Decoder, options: ServerOptions):
        """Raises UserError for a target whose answers cannot be texts in pieces."""
        if decoder.tokenizer is None or not decoder.tokenizer.is_fast:
            raise UserError("a server needs a target with a fast tokenizer")
        decoder.target.refuse_encoder("serve")
        self.decoder, self.options, self.tokenizer = decoder, options, decoder.tokenizer
        self.drafts = options.drafts
        lengths = options.max_length, decoder.max_length
        self.max_length = min(filter(None, lengths), default=1 << 20)
        self.metrics = Metrics(options.model_name)
        decoder.memory.most_kept = options.max_batch if options.prefix_cache else 0
        self.started = int(time.time())
        self.queue = Queue(options.max_queue, options.max_wait)
        self.loop = DecodeLoop(decoder, self.metrics, options.max_batch, self.queue)
        decoder.memory.most_bytes = options.max_kept << 20
        sampling = sampling_of(decoder.target.model) if options.model_sampling else {}
        grammars = JsonGrammars(decoder)
        self.reader = Reader(decoder, self.metrics, self.max_length, grammars, sampling)
        if options.record is not None:
            most = options.max_record << 20
            self.loop.recorder = Recorder(options.record, most, decoder, options.target)
        self.limits = Limits(self.max_length, longest_token(self.tokenizer.get_vocab()))
        self.large_bodies = LargeBodies(self.limits)
        # Several: one long text must not hold up the others. Fast tokenizers only read here.
        self.reading = Threads(self.queue, READERS, "reading", OTHER_READERS)
        self.forming = Threads(self.queue, 1, "forming", 1)  # schemas may take long to compile
        self.loading = Threads(self.queue, 1, "loading")
        self.ending = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether one more answer can be asked for."""
        return self.loop.is_alive and not self.loop.stopping and not self.loop.line.is_full

    async def attend(self, kind: type[Asked], work: Work[Asked], request: Request) -> Response:
        """The response to a body of a kind, which is read and worked on while its client waits."""
        content_type = request.headers.get("content-type", "")
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=GONE)
        request.state.size = len(body)

        async def attended() -> Response:
            read = partial(self.read, body, content_type, kind)
            asked = await self.reading.do(request.state.client, request.state.size, read)
            self.refuse_other(asked.model)
            return await work(asked, request)

        found = await unless_gone(request, attended(), self.ending)
        return found or Response(status_code=GONE)

    def read(self, body: bytes, content_type: str, kind: type[Asked]) -> Asked:
        """The request of a body; raises ApiError as `Limits.read`."""
        self.large_bodies.refuse(body, content_type)
        return self.limits.read(body, content_type, kind)

    async def load(self, asked: DraftsRequest, request: Request) -> Response:
        """Draft with something else from now on; requests at work go on as they began."""
        drafts = [asked.draft] if isinstance(asked.draft, str) else asked.draft
        await self.loading.do(request.state.client, 1, partial(self.draft_with, drafts))
        return JSONResponse({"draft": asked.draft, "drafters": self.drafters})

    def draft_with(self, drafts: Sequence[str]) -> None:
        """Let other drafts decode requests from now on; raises UserError for what cannot draft."""
        for path in filter(None, map(path_of, drafts)):
            try:
                plain_path(path, self.options.drafts_from)
            except UserError as error:
                raise UserError(f"{error} (see --drafts-from)") from error
        decoder = self.decoder.with_drafts(drafts)
        self.decoder, self.reader = decoder, replace(self.reader, decoder=decoder)
        self.loop.go_on_with(decoder)
        self.drafts = tuple(drafts)
        logger.info("answers are drafted by %s from now on", ", ".join(drafts) or "nothing")

    @property
    def drafters(self) -> list[str]:
        """The drafters, by the names that requests may choose."""
        return [] if self.decoder.drafter is None else [*self.decoder.drafter.names]

    async def respond(self, asked: ResponsesRequest, request: Request) -> Response:
        """The next items of a conversation."""
        chat = await self.reading.do(request.state.client, request.state.size, asked.chat)
        return await self.answer(chat, request, asked)

    async def answer(
        self,
        asked: ChatRequest | CompletionRequest,
        request: Request,
        items: ResponsesRequest | None = None,
    ) -> Response:
        """The response to a request for answers; `items` is what a chat was made of."""
        client = request.state.client
        self.loop.line.refuse(1, client)
        inbox = Inbox(client, request.state.salt)
        threads = self.forming if asked.has_form else self.reading
        read = partial(self.reader.jobs, asked, inbox, self.loop.recorder is not None)
        jobs = await threads.do(client, request.state.size, read)
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
        return JSONResponse(await found.whole())

    async def tokenize(self, asked: TextRequest, request: Request) -> Response:
        """The tokens of a text or a conversation."""
        read = partial(asked.prompts, self.decoder)
        [ids] = await self.reading.do(request.state.client, request.state.size, read)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.max_length})

    async def detokenize(self, asked: TokensRequest, request: Request) -> Response:
        """The text of tokens."""

        def read() -> Any:
            self.reader.refuse_unknown(asked.tokens, "tokens")
            return self.tokenizer.decode(asked.tokens)

        text = await self.reading.do(request.state.client, request.state.size, read)
        return JSONResponse({"prompt": text})

    def refuse_other(self, model: str | None) -> None:
        """Raise ApiError 404 for a model that is not the one that is served."""
        name = self.options.model_name
        if model not in (None, name, *self.options.other_names):
            sentence = f"there is no model {model}, only {name}"
            raise ApiError(404, sentence, "model", "model_not_found")

    def described(self) -> str:
        """Describe what is served, for the first line of the log."""
        how = described(self.decoder.target, self.decoder.drafter)
        drafts = ", ".join(self.drafts) or "nothing"
        return (
            f"drafthead {version('drafthead')} serves {self.options.model_name} ({how}), drafted "
            f"by {drafts}, in a context of {self.max_length} tokens"
        )

    def end(self) -> None:
        """Give up what is not answered yet, and tell those who wait."""
        count = self.loop.end(ENDED)
        self.ending.set()
        logger.warning("the server ends: %d answers are broken off", count)


ENDED = ApiError(503, "the server has ended before the answer")


async def unless_gone(
    request: Request, work: Coroutine[Any, Any, Response], ending: asyncio.Event
) -> Response | None:
    """Return the result of some work, or cancel it and return None when the client goes away.

    Raises ApiError 503 where the server ends first.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    ended = asyncio.create_task(ending.wait())
    tasks: list[asyncio.Task[Any]] = [working, leaving, ended]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not working.done():
            raise ENDED
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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

    # Bodies are read here and not by FastAPI, which would do so in the event loop.
    app = FastAPI(openapi_url=None, lifespan=lifespan, redirect_slashes=False)
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
    add_work(app, server)
    add_facts(app, server)
    return app


def add_errors(app: FastAPI) -> None:
    """Errors become OpenAI's JSON."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return answer_to(error, request.scope)

    @app.exception_handler(UserError)
    async def unfit(request: Request, error: UserError) -> JSONResponse:
        return answer_to(ApiError(400, str(error)), request.scope)


def add_work(app: FastAPI, server: Server) -> None:
    """The endpoints that do what a body asks for."""

    def post(path: str, kind: type[Asked], work: Work[Asked]) -> None:
        async def attend(request: Request) -> Response:
            return await server.attend(kind, work, request)

        app.add_api_route(path, attend, methods=["POST"])

    post("/v1/chat/completions", ChatRequest, server.answer)
    post("/v1/completions", CompletionRequest, server.answer)
    post("/v1/responses", ResponsesRequest, server.respond)
    post("/tokenize", TextRequest, server.tokenize)
    post("/detokenize", TokensRequest, server.detokenize)
    post(DRAFTS, DraftsRequest, server.load)

    @app.get(DRAFTS)
    async def drafts() -> dict[str, Any]:
        """Return what drafts now."""
        return {"draft": server.drafts, "drafters": server.drafters}


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
        return Response(status_code=200 if server.loop.is_alive else 503)

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
        """Return the page that Prometheus reads."""
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
