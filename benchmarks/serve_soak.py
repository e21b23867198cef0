"""Many clients for minutes: `python benchmarks/serve_soak.py --minutes 5 --clients 32`.

They send requests of every kind to `drafthead serve`, whole and streamed, and some leave before
their answer has ended. Every answer must be that of the decoder alone, and the server's memory must
not grow in the second half. Prints what was seen as JSON; the exit status is 1 where it was wrong.

With `--attack` the first quarter of the time is quiet. Then others attack the server: they leave
connections half open, send giant and malformed bodies, forms that are hard to compile, long prompts
and ever new temperatures, let prompts be scored, and vanish. No answer to them may be a 5xx, and
the latencies of the clients before and meanwhile are printed.
"""

import asyncio
import json
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
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


WORDS = "x = [1, 2, 3]\n" * 40_000
CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/tokenize"
MALFORMED: list[tuple[str, bytes]] = [
    (CHAT, b"{"), (CHAT, b"[]"), (CHAT, b"[" * 100_000), (CHAT, b'{"messages": 5}'),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (COMPLETIONS, b'{"prompt": [[-1]]}'), (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}'),
    (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"1": NaN}}'),
    (TOKENS, b'{"messages": []}'), ("/detokenize", b'{"tokens": [-1]}'),
]  # fmt: skip


class Attack:
    """Clients that want a server to fail the others, and the statuses that they were given."""

    def __init__(self, url: str, seconds: float):
        self.url, self.until = url.removesuffix("/v1"), time.monotonic() + seconds
        self.seen: dict[str, Counter[int]] = {}
        self.chance = random.Random(0)

    def form(self) -> dict[str, Any]:
        """A JSON schema that is hard to compile, and new."""
        number = self.chance.randrange(10**5, 10**6)
        hard = [
            {"type": "integer", "multipleOf": number},
            {"type": "object", "properties": {f"{number}-{n}": {} for n in range(3000)}},
            {"type": "string", "pattern": f"^(a|b)*a(a|b){{{number % 90}}}$"},
        ]
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": hard[number % 3]}}

    def bodies(self) -> dict[str, Callable[[], tuple[str, bytes]]]:
        """By name what makes the paths and bodies of requests."""

        def ask(path: str, **fields: Any) -> tuple[str, bytes]:
            say = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "go on"}]}
            return path, json.dumps({**say, "max_tokens": 4, **fields}).encode()

        many, stops = ask(COMPLETIONS, prompt=["a"] * 500_000), ask(CHAT, stop=["zz"] * 600_000)
        giant, heat = ask(COMPLETIONS, prompt=WORDS * 6), self.chance.random
        return {
            "many prompts": lambda: many,
            "a giant text": lambda: giant,
            "many stop strings": lambda: stops,
            "hard forms": lambda: ask(CHAT, response_format=self.form()),
            "malformed": lambda: self.chance.choice(MALFORMED),
            "cold temperatures": lambda: ask(CHAT, temperature=100 * heat()),
            "long prompts": lambda: ask(COMPLETIONS, prompt=WORDS[: int(4000 * heat())]),
            "scores": lambda: ask(
                COMPLETIONS, prompt=WORDS[: int(2000 * heat())], echo=True, logprobs=5
            ),
        }

    async def send(self, name: str, made: Callable[[], tuple[str, bytes]]) -> None:
        """Send requests of a kind, one after the other."""
        async with httpx.AsyncClient(timeout=300) as client:
            while time.monotonic() < self.until:
                path, body = made()
                kind = {"Content-Type": "application/json"}
                with suppress(httpx.TransportError):
                    found = await client.post(self.url + path, content=body, headers=kind)
                    self.seen.setdefault(name, Counter())[found.status_code] += 1
                await asyncio.sleep(0.01)

    async def hold(self, sent: bytes, count: int, seconds: float) -> None:
        """Open connections that send something, and leave them after some time."""
        place = self.url.removeprefix("http://").split(":")
        while time.monotonic() < self.until:
            lines: list[socket.socket] = []
            for _ in range(count):
                with suppress(OSError):
                    lines.append(socket.create_connection((place[0], int(place[1])), timeout=2))
                    lines[-1].sendall(sent)
                await asyncio.sleep(0)
            await asyncio.sleep(seconds)
            for line in lines:
                line.close()

    async def run(self) -> dict[str, Counter[int]]:
        """All attacks at a time; what they were answered."""
        half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
        long = json.dumps({"prompt": WORDS[:3000], "max_tokens": 200, "stream": True}).encode()
        whole = half + b"Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        vanish = whole.replace(b"chat/", b"") % (len(long), long)
        await asyncio.gather(
            *(self.send(*kind) for kind in self.bodies().items()),
            self.hold(half, 600, 5),
            self.hold(vanish, 2, 0.5),
            self.hold(whole % (9999, b"{"), 20, 5),
        )
        return self.seen


def attack(url: str, seconds: float) -> dict[str, Counter[int]]:
    """Attack a server for some time, in a process of its own."""
    return asyncio.run(Attack(url, seconds).run())


def latencies(quiet: list[float], attacked: list[float]) -> Iterator[tuple[str, Any]]:
    """Medians and 95th percentiles in seconds, before an attack and in it, and their ratios."""
    for name, place in (("p50", 49), ("p95", 94)):
        pair = [quantiles(each, n=100)[place] for each in (quiet, attacked)]
        yield name, [round(value, 2) for value in (*pair, pair[1] / pair[0])]


class Soak:
    """Clients of one server, and what they have seen."""

    def __init__(self, server: ServerProcess, asked: list[tuple[dict[str, Any], str]]):
        self.server, self.asked = server, asked
        self.answers = self.left = self.tokens = 0
        self.wrong: list[dict[str, Any]] = []
        self.memory: list[int] = []
        self.seconds: list[tuple[float, float]] = []  # when an answer had come, and what it took
        self.attacked: dict[str, Counter[int]] = {}

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
                began = time.monotonic()
                if chance.random() < 0.5:
                    found = await ask(plain, self.server.url, body)
                    text, tokens = found.text, found.tokens
                else:
                    answer = await api.chat.completions.create(model="served", **body)
                    text, tokens = answer.choices[0].message.content, answer.usage.completion_tokens
                self.answers, self.tokens = self.answers + 1, self.tokens + tokens
                self.seconds.append((began, time.monotonic() - began))
                if text != right:
                    self.wrong.append({"asked": body, "right": right, "found": text})

    async def watch(self, until: float) -> None:
        """Note the memory of the server."""
        process = psutil.Process(self.server.process.pid)
        while time.monotonic() < until:
            self.memory.append(process.memory_info().rss)
            await asyncio.sleep(2)

    async def run(self, clients: int, seconds: float, attacks: bool) -> None:
        """Let all clients ask until the time is over."""
        until, self.quiet = time.monotonic() + seconds, time.monotonic() + seconds / 4
        asks = [self.client(number, until) for number in range(clients)]
        await asyncio.gather(self.watch(until), *asks, *([self.attack(seconds)] * attacks))

    async def attack(self, seconds: float) -> None:
        """Let another process attack the server after the quiet time."""
        await asyncio.sleep(seconds / 4)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(attack, self.server.url, 3 * seconds / 4)
            self.attacked = await asyncio.wrap_future(found)

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
            "memory, MB": [each // 2**20 for each in self.memory[:: max(1, half // 10)]],
            **self.under_attack(),
        }

    def under_attack(self) -> dict[str, Any]:
        """What the clients have waited, and what those who attacked were answered."""
        if not self.attacked:
            return {}
        quiet = [took for began, took in self.seconds if began + took < self.quiet]
        attacked = [took for began, took in self.seconds if began > self.quiet]
        answered = {name: dict(statuses) for name, statuses in self.attacked.items()}
        waited = dict(latencies(quiet, attacked))
        return {"seconds quiet, under attack, ratio": waited, "statuses of attacks": answered}


def main(
    target: Annotated[str, typer.Option(help="The model, in float32.")] = "assets/demo_target",
    draft: Annotated[str, typer.Option(help="What drafts.")] = "lookup",
    minutes: Annotated[float, typer.Option(help="How long clients ask.")] = 5.0,
    clients: Annotated[int, typer.Option(help="How many at a time.")] = 32,
    attack: Annotated[bool, typer.Option(help="Let others attack the server.")] = False,
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
        asyncio.run(soak.run(clients, 60 * minutes, attack))
        metrics = httpx.get(server.url.replace("/v1", "/metrics")).text
        status = server.stop()
    found = soak.report()
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_")]
    found |= {"exit status": status, "at the end": running}
    print(json.dumps(found, indent=1))
    grown = 2**20 * (found["memory at the end, MB"] - found["memory at half, MB"])
    failed = [name for name, seen in soak.attacked.items() if any(each >= 500 for each in seen)]
    sys.exit(bool(soak.wrong or status or grown > GROWTH or failed))


if __name__ == "__main__":
    typer.run(main)
