"""Servers beside ours: `python benchmarks/serve_race.py --target smollm2 --prompts FILE`.

Each contestant of `serve_race.yaml` is a server of its own. For 1, 4 and 16 clients they take
turns, in random order in each round, and stand still in between: every client sends greedy chats
one after the other. Speeds are tokens of all clients a second, and medians over rounds; so are the
times to the first text.
"""

import asyncio
import os
import random
import re
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
import yaml
from recorded import write_record
from rich.console import Console
from rich.table import Table
from served import ServerProcess, ask, end_with_servers, started

from drafthead.core.target.any_target import whole_folder
from drafthead.train.data.conversations import read_conversations

HERE = Path(__file__).parent


def commands(only: list[str] | None) -> dict[str, str]:
    """The commands of the contestants whose variables are set, by name."""
    found = {}
    for name, command in yaml.safe_load((HERE / "serve_race.yaml").read_text()).items():
        missing = [v for v in re.findall(r"\$(\w+)", command) if v not in os.environ]
        if missing or (only and name not in only):
            print(f"without {name}: {', '.join(missing) or 'not asked for'}")
            continue
        found[name] = command
    return found


async def one_turn(
    server: ServerProcess, says: list[str], clients: int, max_tokens: int
) -> dict[str, float]:
    """All clients ask their share of what is said; speed and median time to the first text."""
    waiting, found = list(says), []

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            messages = [{"role": "user", "content": waiting.pop()}]
            body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
            found.append(await ask(http, server.url, body))

    began = time.perf_counter()
    # A connection for each request: a server may end one just when it is used again.
    alone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=1800, limits=alone) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    seconds = time.perf_counter() - began
    tokens = sum(each.tokens for each in found)
    return {
        "tokens": tokens,
        "tokens/s": tokens / seconds,
        "first text, s": median(each.first for each in found),
    }


def raced(
    servers: dict[str, ServerProcess],
    says: list[str],
    clients: list[int],
    rounds: int,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """The figures of every turn; each round has other prompts, the same for all contestants."""
    turns, chance = [], random.Random(0)
    for number in range(rounds):
        for count in clients:
            asked = chance.sample(says, min(len(says), max(4, 2 * count)))
            for name in chance.sample(sorted(servers), len(servers)):
                servers[name].go_on()
                figures = asyncio.run(one_turn(servers[name], asked, count, max_tokens))
                servers[name].pause()
                turns.append({"round": number, "server": name, "clients": count, **figures})
                print(turns[-1], flush=True)
    return turns


def summary(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds, for each contestant and number of clients."""
    rows = []
    for name, count in dict.fromkeys((turn["server"], turn["clients"]) for turn in turns):
        own = [t for t in turns if (t["server"], t["clients"]) == (name, count)]
        medians = {key: median(t[key] for t in own) for key in ("tokens/s", "first text, s")}
        rows.append({"server": name, "clients": count, **medians})
    return sorted(rows, key=lambda row: (row["clients"], -row["tokens/s"]))


def main(
    target: Annotated[str, typer.Option(help="The model.")] = "smollm2",
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")] = (
        HERE.parent / "assets/smollm2_prompts/test.jsonl"
    ),
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("serve_race.json"),
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    clients: Annotated[list[int] | None, typer.Option(help="Numbers of clients.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Contestants; all by default.")] = None,
) -> None:
    """Start all servers, warm them up, race them, and write the figures."""
    end_with_servers()
    says = [row.messages[0]["content"] for row in read_conversations(str(prompts))]
    counts = clients or [1, 4, 16]
    chosen, logs = commands(only), output.parent
    with ExitStack() as stack:
        servers, scratch = {}, Path(stack.enter_context(TemporaryDirectory()))
        folder = str(whole_folder(target, scratch))
        for name, command in chosen.items():
            log = logs / f"serve_race_{re.sub(r'[^a-z]+', '_', name.lower())}.log"
            full = os.path.expandvars(command).replace("{target}", folder)
            servers[name] = stack.enter_context(started(full, log))
            servers[name].wait()
        for name, server in servers.items():
            for count in counts:
                asyncio.run(one_turn(server, says[:count], count, max_tokens))
            server.pause()  # so that it takes nothing from the others
            print(f"{name} is warm", flush=True)
        turns = raced(servers, says, counts, rounds, max_tokens)
    rows = summary(turns)
    report = {
        "commands": chosen,
        "max_tokens": max_tokens,
        "summary": rows,
        "turns": turns,
    }
    write_record(output, report)
    table = Table("clients", "server", "tokens/s", "first text, ms")
    for row in rows:
        first = f"{1000 * row['first text, s']:.0f}"
        table.add_row(str(row["clients"]), row["server"], f"{row['tokens/s']:.1f}", first)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
