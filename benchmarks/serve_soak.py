"""Many clients for minutes: `python benchmarks/serve_soak.py --minutes 5 --clients 32`.

They send requests of every kind to `drafthead serve`, whole and streamed, and some leave before
their answer has ended. Every answer must be that of the decoder alone, and the server's memory must
not grow in the second half. Prints what was seen as JSON; the exit status is 1 where it was wrong.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from openai import AsyncOpenAI
from served import ServerProcess, ask, end_with_servers, started

from drafthead.infer import Decoder

LEAVES = 0.05  # share of streams that are broken off
GROWTH = 64 * 2**20  # bytes that the second half may add
SAYS = [
    "def add(a, b):", "class Stack:", "import json", "for i in range(10):", "def area(radius):",
    "Write a loop.", "x = [1, 2, 3]", "def test_add():",
]  # fmt: skip


def bodies() -> list[dict[str, Any]]:
    """Requests of every kind, by what is said, how it is drawn, and where it ends."""
    found: list[dict[str, Any]] = []
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"temperature": 0, "frequency_penalty": 0.5},
    ]
    for number, say in enumerate(SAYS):
        for way in ways:
            body = {"messages": [{"role": "user", "content": say}], **way}
            found.append({**body, "max_tokens": 12 + 8 * (number % 5)})
    return found


def expected(decoder: Decoder, body: dict[str, Any]) -> str:
    """The decoder's own answer to a request."""
    from transformers import GenerationConfig

    penalty = body.get("frequency_penalty")
    config = GenerationConfig(**({} if penalty is None else {"frequency_penalty": penalty}))
    names = ("temperature", "top_p", "seed")
    options: Any = {name: body[name] for name in names if name in body}
    return decoder.generate(
        body["messages"],
        max_new_tokens=body["max_tokens"],
        generation_config=config,
        **options,
    ).texts[0]


class Soak:
    """Clients of one server, and what they have seen."""

    def __init__(self, server: ServerProcess, asked: list[tuple[dict[str, Any], str]]):
        self.server, self.asked = server, asked
        self.answers = self.left = self.tokens = 0
        self.wrong: list[dict[str, Any]] = []
        self.memory: list[int] = []

    async def client(self, number: int, until: float) -> None:
        """Ask one thing after the other."""
        chance = random.Random(number)
        api = AsyncOpenAI(base_url=self.server.url, api_key="none", timeout=600, max_retries=0)
        async with httpx.AsyncClient(timeout=600) as plain:
            while time.monotonic() < until:
                body, right = chance.choice(self.asked)
                if chance.random() < LEAVES:
                    async with plain.stream(
                        "POST", f"{self.server.url}/chat/completions", json={**body, "stream": True}
                    ) as response:
                        async for _ in response.aiter_lines():
                            break
                    self.left += 1
                    continue
                if chance.random() < 0.5:
                    found = await ask(plain, self.server.url, body)
                    text, tokens = found.text, found.tokens
                else:
                    answer = await api.chat.completions.create(model="served", **body)
                    text, tokens = answer.choices[0].message.content, answer.usage.completion_tokens
                self.answers, self.tokens = self.answers + 1, self.tokens + tokens
                if text != right:
                    self.wrong.append({"asked": body, "right": right, "found": text})

    async def watch(self, until: float) -> None:
        """Note the memory of the server."""
        process = psutil.Process(self.server.process.pid)
        while time.monotonic() < until:
            self.memory.append(process.memory_info().rss)
            await asyncio.sleep(2)

    async def run(self, clients: int, seconds: float) -> None:
        """Let all clients ask until the time is over."""
        until = time.monotonic() + seconds
        await asyncio.gather(
            self.watch(until), *(self.client(number, until) for number in range(clients))
        )

    def report(self) -> dict[str, Any]:
        """What was seen."""
        half = len(self.memory) // 2
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "left": self.left,
            "wrong": len(self.wrong),
            "first wrong": self.wrong[:1],
            "memory at half, MB": max(self.memory[:half], default=0) // 2**20,
            "memory at the end, MB": max(self.memory[half:], default=0) // 2**20,
        }


def main(
    target: Annotated[str, typer.Option(help="The model, in float32.")] = "assets/demo_target",
    draft: Annotated[str, typer.Option(help="What drafts.")] = "lookup",
    minutes: Annotated[float, typer.Option(help="How long clients ask.")] = 5.0,
    clients: Annotated[int, typer.Option(help="How many at a time.")] = 32,
) -> None:
    """Run the soak."""
    end_with_servers()
    decoder = Decoder.from_pretrained(target, dtype="float32")
    asked = [(body, expected(decoder, body)) for body in bodies()]
    command = (
        f"{sys.executable} -m drafthead.scripts.cli serve --target {target} --dtype float32 "
        f"--draft {draft} --served-model-name served --port {{port}}"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        started(command, Path(folder) / "server.log") as server,
    ):
        server.wait()
        soak = Soak(server, asked)
        asyncio.run(soak.run(clients, 60 * minutes))
        metrics = httpx.get(server.url.replace("/v1", "/metrics")).text
        status = server.stop()
    found = soak.report()
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_")]
    found |= {"exit status": status, "at the end": running}
    print(json.dumps(found, indent=1))
    grown = 2**20 * (found["memory at the end, MB"] - found["memory at half, MB"])
    sys.exit(bool(soak.wrong or status or grown > GROWTH))


if __name__ == "__main__":
    typer.run(main)
