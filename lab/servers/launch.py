"""Starts a script that serves a head, waits until it answers, and stops it with Ctrl-C."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import requests

from drafthead.core.errors import UserError
from drafthead.lab.servers.export_for import SCRIPT, Served

INSTALL = {
    "vllm": "pip install vllm, or name its program in VLLM",
    "sglang": "pip install sglang, or name a Python that has it in PYTHON",
    "llamacpp": "name the folder of its sources in LLAMA_CPP, and its server in LLAMA_SERVER; its "
    "converter needs pip install sentencepiece",
}
NOT_FOUND = 127  # a shell's status where there is no such program
PATIENCE = 30  # seconds that a server has to end by itself


def launch(folder: Path, served: Served) -> None:
    """Start the script in a folder and print how to call it; returns when the server has ended.

    Raises UserError when it ends before it is ready or with an error, and KeyboardInterrupt at
    Ctrl-C, once the server and all that it started are gone. So they are at SIGTERM and SIGHUP.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with running(folder, served) as (address, process):
        print(how_to_call(address, served), flush=True)
        if status := process.wait():
            raise UserError(f"{served.server} ended with status {status}, see above")


@contextmanager
def running(
    folder: Path, served: Served, log: IO[bytes] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server that a script starts, and its process, while the block runs.

    What it prints is seen here, or goes into `log`. Raises UserError when another program listens
    at its port, and when it ends before it is ready.
    """
    port, script = os.environ.get("PORT", "8000"), folder / SCRIPT
    address = f"http://127.0.0.1:{port}"
    if not port.isdecimal():
        raise UserError(f"PORT={port} in the environment is no number of a port")
    if is_taken(int(port)):
        raise UserError(f"port {port} is in use: PORT=8001 sh {script} starts it at another")
    # A group of its own: Ctrl-C reaches this process alone, which then ends the others.
    process = subprocess.Popen(
        ["sh", str(script)], start_new_session=True, stdout=log, stderr=log and subprocess.STDOUT
    )
    try:
        while not is_ready(address):
            if process.poll() is not None:
                raise UserError(
                    f"{script} ended with status {process.returncode} before it answered, its "
                    f"last words are above. {remedy(served.server, process.returncode)}. Then "
                    f"`sh {script}` starts it again"
                )
            time.sleep(0.2)
        yield address, process
    finally:
        stop(process)


def remedy(server: str, status: int) -> str:
    """Return what helps where a server has ended with a status before it was ready."""
    if server == "vllm" and status != NOT_FOUND:
        return "On a CPU vLLM needs OPTIONS, see docs/formats.md#for-a-server"
    return f"If {server} is not installed: {INSTALL[server]}"


def is_taken(port: int) -> bool:
    """Tell whether a program listens at a port of this machine."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def is_ready(address: str) -> bool:
    """Tell whether a server says that it can answer."""
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.RequestException:
        return False


def how_to_call(address: str, served: Served) -> str:
    """Return what a user may type now."""
    question = {"role": "user", "content": "Tell me about tides."}
    body = json.dumps({"model": served.model, "messages": [question]})
    return (
        f"\n{served.server} answers on {address}, Ctrl-C stops it:\n"
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        "Does it write the target's text, and accept as many drafts as here?\n"
        f"  drafthead audit {address} --target {served.target} --head {served.head}\n"
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: by Ctrl-C, and without asking if that takes too long."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
