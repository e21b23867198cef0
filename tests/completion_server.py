"""An OpenAI-compatible server of completions in this process, as far as distillation needs one."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock

import local_server
import torch
from local_server import Quiet

from drafthead.infer import Decoder


@dataclass
class Completions:
    """A decoder that answers token ids, and what goes wrong meanwhile."""

    decoder: Decoder
    models: tuple[str, ...] = ("served",)
    shows_ids: bool = True
    shows_ends: bool = True  # in the ids
    key: str | None = None  # that a request must bring
    # Statuses of the first requests for completions; 0 closes the connection.
    failures: list[int] = field(default_factory=list)
    is_gone: bool = False  # every connection is closed
    most: int = 0  # requests for completions that were there at the same time
    there: int = 0
    seconds: float = 0.0  # that an answer takes at least, beside those of others
    retry_after: str = ""  # which an answer that is a failure asks for
    bodies: list[dict] = field(default_factory=list)  # of all requests for completions
    url: str = ""
    lock: Lock = field(default_factory=Lock)

    def listed(self) -> dict:
        length = self.decoder.max_length
        return {"data": [{"id": name, "max_model_len": length} for name in self.models]}

    def shown(self, path: str) -> dict | str | None:
        """The answer to a GET; None where there is nothing."""
        return self.listed() if path == "/v1/models" else None

    def answered(self, path: str, body: dict) -> dict:
        """The answer to a POST."""
        return self.complete(body)

    def complete(self, body: dict) -> dict:
        if body.get("echo"):
            return {"choices": [self.echoed(body["prompt"])]}
        time.sleep(self.seconds)
        with self.lock:
            result = self.decoder.generate(
                [body["prompt"]],
                max_new_tokens=body["max_tokens"],
                temperature=body["temperature"],
                top_p=body["top_p"],
                seed=body["seed"],
            )
        ids = result.sequences[0]
        ended = ids[-1] in body["stop_token_ids"]
        shown = ids[:-1] if ended else ids
        choice = {
            "text": self.decoder.tokenizer.decode(shown).rstrip("\ufffd"),
            "finish_reason": "stop" if ended else "length",
        }
        if self.shows_ids:
            choice["token_ids"] = ids if self.shows_ends else shown
            choice["prompt_token_ids"] = body["prompt"]
        return {"choices": [choice]}

    def echoed(self, prompt: list[int]) -> dict:
        """A prompt with its log-probabilities."""
        ids = torch.tensor([prompt])
        with self.lock, torch.no_grad():
            found = self.decoder.target.model(ids).logits.float().log_softmax(-1)
        of_next = found[0, :-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return {"text": "", "finish_reason": "length",
                "logprobs": {"token_logprobs": [None, *of_next, -1.0]}}  # fmt: skip


@contextmanager
def serving(completions: Completions) -> Iterator[str]:
    """The address of a server, without /v1, while the block runs."""

    class Handler(Quiet, BaseHTTPRequestHandler):
        def send_json(self, status: int, content: dict | str) -> None:
            wait = completions.retry_after if status >= 400 else ""
            text = content if isinstance(content, str) else json.dumps(content)
            self.send(status, text.encode(), **{"Retry-After": wait} if wait else {})

        def do_GET(self) -> None:
            if completions.is_gone:
                return
            shown = completions.shown(self.path)
            self.send_json(*((404, {"detail": "Not Found"}) if shown is None else (200, shown)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with completions.lock:
                completions.bodies.append(body)
                status = completions.failures.pop(0) if completions.failures else 200
                status = 0 if completions.is_gone else status
                completions.there += 1
                completions.most = max(completions.most, completions.there)
            wanted = completions.key and f"Bearer {completions.key}"
            if wanted and self.headers.get("Authorization") != wanted:
                status = 401
            try:
                answer = completions.answered(self.path, body) if status == 200 else {}
            finally:
                with completions.lock:
                    completions.there -= 1
            if completions.is_gone:  # while it answered
                return
            if status == 200:
                self.send_json(200, answer)
            elif status:
                self.send_json(status, {"error": {"message": f"planted {status}"}})

    with local_server.serving(Handler) as url:
        yield url
