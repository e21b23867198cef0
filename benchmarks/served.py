"""Servers with OpenAI's endpoints as processes, and requests to them that are timed."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

STARTS_IN = 1800  # seconds: compiling takes some minutes


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class ServerProcess:
    """A started server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Where OpenAI's clients find it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait(self, within: float = STARTS_IN) -> None:
        """Until it answers; raises RuntimeError with the end of its log when it does not."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise RuntimeError(f"{self.log}: {self.log.read_text()[-2000:]}")

    def pause(self) -> None:
        """Stand still: some servers wait for requests by looking for them without end."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self, within: float = 60) -> int:
        """Ask it to end; returns its exit status."""
        if self.process.poll() is None:
            self.go_on()
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def end_with_servers() -> None:
    """From now on SIGTERM leaves the blocks of `started`, which end their servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def started(command: str, log: Path) -> Iterator[ServerProcess]:
    """The server of a command, in which {port} is its port; it ends with the block."""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            shlex.split(command.format(port=port)),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ServerProcess(process, port, log)
    try:
        yield server
    finally:
        server.stop()


@dataclass
class Timed:
    """What a streamed request brought, and when."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0  # seconds until the first text
    seconds: float = 0.0
    end: dict[str, Any] = field(default_factory=dict)  # the last chunk with usage


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Timed:
    """Stream a chat completion; raises RuntimeError for an error."""
    found, began = Timed(), time.perf_counter()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/chat/completions", json=asked) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                if text and not found.text:
                    found.first = time.perf_counter() - began
                found.text += text
            if chunk.get("usage"):
                found.tokens, found.end = chunk["usage"]["completion_tokens"], chunk
    found.seconds = time.perf_counter() - began
    return found
