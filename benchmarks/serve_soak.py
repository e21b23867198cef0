"""Many clients for minutes: `python benchmarks/serve_soak.py --minutes 5 --clients 32`.

They send requests of every kind to `drafthead serve`, whole and streamed, and some leave before
their answer has ended. Every answer must be that of the decoder alone, and the server's memory must
not grow in the second half. Prints what was seen as JSON; the exit status is 1 where it was wrong.

With `--attack` the first quarter of the time is quiet. Then, for half of it, others, from another
address, attack the server: they leave connections half open or without a body, read nothing, send
giant and malformed bodies and such of a million wrong parts, forms that are hard to compile and
whose clients leave, long prompts and ever new temperatures, let prompts be scored, ask for drafts
of pipes, and vanish.
No answer to them may be a 5xx. In the last quarter a loop takes as much processor time as they did,
who would not be on the server's machine. The latencies of the clients in all three are printed.

With `--fair` there is no soak: a short question is asked alone, and while another address waits for
forty answers of 1,500 tokens. It may take four times as long. The target needs such a context.
"""

import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import httpx
import psutil
import typer
from openai import AsyncOpenAI
from served import ServerProcess, ask, end_with_servers, started

from drafthead.infer import Decoder

LEAVES = 0.05  # share of streams that are broken off
GROWTH = 64 * 2**20  # bytes that the second half may add
LONG = 40  # answers of 1,500 tokens
WAITED = "all long answers were being written or waited for"
FAIR = 4  # times as long as alone, which a short answer may take beside them
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
DRAFTS = "/v1/drafts"
MALFORMED: list[tuple[str, bytes]] = [
    (CHAT, b"{"), (CHAT, b"[]"), (CHAT, b"[" * 100_000), (CHAT, b'{"messages": 5}'),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (COMPLETIONS, b'{"prompt": [[-1]]}'), (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}'),
    (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"1": NaN}}'),
    (TOKENS, b'{"messages": []}'), ("/detokenize", b'{"tokens": [-1]}'),
]  # fmt: skip
# Of a million parts, in a field that nobody reads, and in lists of other things.
WRONG_PARTS = [
    b'{"prompt": "a", "%s": [%s]}' % (name, b",".join([part] * (3_900_000 // (1 + len(part)))))
    for name in (b"metadata", b"stop_token_ids", b"draft", b"guided_choice", b"input", b"messages")
    for part in (b"{}", b"[]", b'""', b"1")
]
FIELDS = b"{%s}" % b",".join(b'"k%d": 1' % number for number in range(300_000))
KEY, ADDRESS = "soak", "127.0.0.2"  # of administration; of those who attack


class Attack:
    """Clients that want a server to fail the others, and the statuses that they were given."""

    def __init__(self, url: str, seconds: float, pipe: Path):
        self.url, self.until = url.removesuffix("/v1"), time.monotonic() + seconds
        self.pipe = pipe  # that nobody writes into
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

        paths = CHAT, COMPLETIONS, TOKENS, "/detokenize", "/v1/responses", DRAFTS
        pipes = [str(self.pipe), f"head:{self.pipe}", "/dev/zero", str(self.pipe.parent), "a/b"]
        many, stops = ask(COMPLETIONS, prompt=["a"] * 500_000), ask(CHAT, stop=["zz"] * 600_000)
        giant, heat = ask(COMPLETIONS, prompt=WORDS * 6), self.chance.random
        return {
            "many prompts": lambda: many,
            "a giant text": lambda: giant,
            "many stop strings": lambda: stops,
            "hard forms": lambda: ask(CHAT, response_format=self.form()),
            "malformed": lambda: self.chance.choice(MALFORMED),
            "wrong parts": lambda: (
                self.chance.choice(paths),
                self.chance.choice([*WRONG_PARTS, FIELDS]),
            ),
            "pipes": lambda: ask(
                DRAFTS, messages=None, max_tokens=None, draft=[self.chance.choice(pipes)]
            ),
            "cold temperatures": lambda: ask(CHAT, temperature=100 * heat()),
            "long prompts": lambda: ask(COMPLETIONS, prompt=WORDS[: int(4000 * heat())]),
            "scores": lambda: ask(
                COMPLETIONS, prompt=WORDS[: int(2000 * heat())], echo=True, logprobs=5
            ),
        }

    async def send(self, name: str, made: Callable[[], tuple[str, bytes]]) -> None:
        """Send requests of a kind, one after the other."""
        kind = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        local = httpx.AsyncHTTPTransport(local_address=ADDRESS)
        async with httpx.AsyncClient(timeout=300, transport=local) as client:
            while time.monotonic() < self.until:
                path, body = made()
                with suppress(httpx.TransportError):
                    found = await client.post(self.url + path, content=body, headers=kind)
                    self.seen.setdefault(name, Counter())[found.status_code] += 1
                await asyncio.sleep(0.01)

    async def hold(self, sent: bytes, count: int, seconds: float) -> None:
        """Open connections that send something, and leave them after some time."""
        while time.monotonic() < self.until:
            await self.hold_once(sent, count, seconds)

    async def hold_once(self, sent: bytes, count: int, seconds: float = 0.2) -> None:
        """Open connections, and leave them after some time."""
        host, port = self.url.removeprefix("http://").split(":")
        lines: list[asyncio.StreamWriter] = []

        async def open_one() -> None:
            opening = asyncio.open_connection(host, int(port), local_addr=(ADDRESS, 0))
            with suppress(OSError, TimeoutError):
                _, line = await asyncio.wait_for(opening, 2)
                line.write(sent)
                lines.append(line)

        await asyncio.gather(*(open_one() for _ in range(count)))
        await asyncio.sleep(seconds)
        for line in lines:
            line.transport.abort()

    async def leave(self, whole: bytes) -> None:
        """Ask for hard forms, twenty at a time, and leave before they are compiled."""
        while time.monotonic() < self.until:
            _, body = self.bodies()["hard forms"]()
            await self.hold_once(whole % (len(body), body), 20)
            await asyncio.sleep(1)

    async def run(self) -> dict[str, Counter[int]]:
        """All attacks at a time; what they were answered."""
        half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
        long = json.dumps({"prompt": WORDS[:3000], "max_tokens": 200, "stream": True}).encode()
        whole = half + b"Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        vanish = whole.replace(b"chat/", b"") % (len(long), long)
        unread = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500
        await asyncio.gather(
            *(self.send(*kind) for kind in self.bodies().items()),
            self.hold(half, 600, 5),
            self.hold(vanish, 2, 0.5),
            self.hold(whole % (9999, b"{"), 1200, 5),
            self.hold(unread, 1, 5),
            self.leave(whole),
        )
        return self.seen


def attack(url: str, seconds: float) -> tuple[dict[str, Counter[int]], float]:
    """Attack a server for some time, in a process of its own: answers, and processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(pipe := Path(folder) / "model.safetensors")
        began = time.process_time()
        return asyncio.run(Attack(url, seconds, pipe).run()), time.process_time() - began


def spin(share: float, seconds: float) -> None:
    """Take a share of a processor's time for some time."""
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        while time.monotonic() < began + 0.01 * share:
            pass
        time.sleep(0.01 * (1 - share))


def latencies(phases: dict[str, list[float]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Medians, 95th percentiles and the longest, in seconds, of phases, and an attack's ratios."""
    for name, place in (("p50", 49), ("p95", 94), ("longest", None)):
        found = {
            phase: max(seconds) if place is None else quantiles(seconds, n=100)[place]
            for phase, seconds in phases.items()
        }
        attacked = found["attack"]
        ratios = {f"attack / {other}": attacked / found[other] for other in ("quiet", "loop")}
        yield name, {what: round(value, 2) for what, value in (found | ratios).items()}


async def fairness(url: str) -> dict[str, Any]:
    """The seconds of short questions alone, and beside the long answers of another address."""
    long = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 1500}
    local = httpx.AsyncHTTPTransport(local_address=ADDRESS)
    found: list[list[float]] = []
    async with httpx.AsyncClient(timeout=600) as one, httpx.AsyncClient(transport=local) as other:

        async def ask_in_turn() -> None:
            asked = [{"role": "user", "content": f"{say} {len(found)}"} for say in SAYS]
            bodies = [{"messages": [each], "max_tokens": 16, "temperature": 0} for each in asked]
            found.append([(await ask(one, url, body)).seconds for body in bodies])

        async def flood() -> None:
            await other.post(
                f"{url}/chat/completions", json={**long, "ignore_eos": True}, timeout=None
            )

        await ask_in_turn()
        floods = [asyncio.create_task(flood()) for _ in range(LONG)]
        await asyncio.sleep(5)
        await ask_in_turn()
        is_flooded = not any(each.done() for each in floods)
        for each in floods:
            each.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
    medians = [median(each) for each in found]
    return {
        "seconds alone": [round(each, 3) for each in found[0]],
        "seconds beside long answers": [round(each, 3) for each in found[1]],
        "ratio of medians": round(medians[1] / medians[0], 2),
        WAITED: is_flooded,
    }


def is_fair(seen: dict[str, Any]) -> bool:
    """Whether short answers were fast enough beside long ones, which there were to the end."""
    return bool(seen[WAITED]) and seen["ratio of medians"] <= FAIR


class Soak:
    """Clients of one server, and what they have seen."""

    def __init__(self, server: ServerProcess, asked: list[tuple[dict[str, Any], str]]):
        self.server, self.asked = server, asked
        self.answers = self.left = self.tokens = 0
        self.wrong: list[dict[str, Any]] = []
        self.memory: list[int] = []
        self.seconds: list[tuple[float, float]] = []  # when an answer had come, and what it took
        self.attacked: dict[str, Counter[int]] = {}
        self.share = 0.0  # of a processor, that those who attacked took

    async def client(self, number: int, until: float) -> None:
        """Ask one thing after the other, from an address of its own."""
        chance = random.Random(number)
        local = httpx.AsyncHTTPTransport(local_address=f"127.0.1.{1 + number}")
        async with httpx.AsyncClient(timeout=600, transport=local) as plain:
            api = AsyncOpenAI(
                base_url=self.server.url, api_key="none", max_retries=0, http_client=plain
            )
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
        self.began, self.lasts = time.monotonic(), seconds
        until = self.began + seconds
        asks = [self.client(number, until) for number in range(clients)]
        await asyncio.gather(self.watch(until), *asks, *([self.attack(seconds)] * attacks))

    async def attack(self, seconds: float) -> None:
        """Let another process attack the server after the quiet time, and then take its time."""
        await asyncio.sleep(seconds / 4)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(attack, self.server.url, seconds / 2)
            self.attacked, taken = await asyncio.wrap_future(found)
            self.share = taken / (seconds / 2)
            left = self.began + seconds - time.monotonic()
            await asyncio.wrap_future(pool.submit(spin, min(1.0, self.share), left))

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
            # At the start, after each twentieth of the time, and at the end.
            "memory, MB": [each // 2**20 for each in self.memory[:: max(1, half // 10)]],
            **self.under_attack(),
        }

    def under_attack(self) -> dict[str, Any]:
        """What the clients have waited, and what those who attacked were answered."""
        if not self.attacked:
            return {}
        quarter, within = self.lasts / 4, defaultdict[str, list[float]](list)
        for began, took in self.seconds:
            start, end = (began - self.began) / quarter, (began + took - self.began) / quarter
            within["quiet" if end < 1 else "attack" if start < 3 else "loop"].append(took)
        return {
            "seconds of answers": dict(latencies(within)),
            "share of a processor that attacks took": round(self.share, 2),
            "statuses of attacks": {name: dict(seen) for name, seen in self.attacked.items()},
        }


@contextmanager
def serving(target: str, options: str) -> Iterator[ServerProcess]:
    """A server of a target that answers."""
    command = f"{sys.executable} -m drafthead.scripts.cli serve --target {target} {options}"
    with (
        tempfile.TemporaryDirectory() as folder,
        started(command + " --port {port}", Path(folder) / "server.log") as server,
    ):
        server.wait()
        yield server


def main(
    target: Annotated[str, typer.Option(help="The model, in float32.")] = "assets/demo_target",
    draft: Annotated[str, typer.Option(help="What drafts.")] = "lookup",
    minutes: Annotated[float, typer.Option(help="How long clients ask.")] = 5.0,
    clients: Annotated[int, typer.Option(help="How many at a time.")] = 32,
    attack: Annotated[bool, typer.Option(help="Let others attack the server.")] = False,
    fair: Annotated[bool, typer.Option(help="Measure one client beside another's.")] = False,
) -> None:
    """Run the soak."""
    end_with_servers()
    if fair:
        with serving(target, f"--draft {draft}") as server:
            seen = asyncio.run(fairness(server.url))
        print(json.dumps(seen, indent=1))
        sys.exit(not is_fair(seen))
    decoder = Decoder.from_pretrained(target, dtype="float32")
    asked = [(body, expected(decoder, body)) for body in bodies()]
    own = f"--served-model-name served --admin-key {KEY} --drafts-from /"
    with serving(target, f"--dtype float32 --draft {draft} {own}") as server:
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
