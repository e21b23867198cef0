"""What passes cost on this processor: `python benchmarks/passes.py --dtype int8 --kernels avx2
--output FILE`.

Passes that verify 4 to 64 nodes, each between plain ones; plain decoding; passes over prompts;
memory and seconds of `drafthead generate` for one token. Each run is a row of the file, and all are
printed.
"""

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from bandwidth import seconds_of
from random_models import SHAPES, random_llama
from recorded import about_run
from tqdm import trange

from drafthead.backends.cpu.kernels.kernel_set import VARIABLE, kernel_set
from drafthead.core.sampling import most_probable
from drafthead.core.storage.files import write_json
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.rounding import to_int8
from drafthead.infer import Decoder
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.timing.step_timing import PROMPT_TOKENS, UNTIMED_STEPS, VISIT_STEPS
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.lab.theory.chains import greedy_stepper, pass_alone

CPU = torch.device("cpu")
NODES, PROMPTS = (4, 16, 32, 64), (64, 512)
ANSWER = 32  # tokens of plain decoding
RUN = ("model", "weights", "kernels")  # names a row of the file


def random_prompt(decoder: Decoder, tokens: int) -> list[int]:
    """A prompt of random tokens."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(decoder.target.vocab_size, (tokens,), generator=generator).tolist()


def stepper_for(decoder: Decoder, tokens: int) -> Stepper:
    """A greedy stepper that has not read its prompt of so many tokens yet."""
    prompts = [random_prompt(decoder, tokens)]
    return greedy_stepper(decoder.target, prompts, NO_FEATURES, max(NODES))


@torch.no_grad()
def measured(decoder: Decoder, rounds: int) -> dict[str, float]:
    """Tokens per second of plain decoding, passes over trees as multiples of the plain ones before
    and after, and seconds of passes over prompts: all in turns.

    Passes find the most probable token after each node.
    """
    stepper = stepper_for(decoder, PROMPT_TOKENS)
    stepper.prefill()
    answered = [random_prompt(decoder, PROMPT_TOKENS)]

    def visit(nodes: int) -> float:
        run = pass_alone(stepper, nodes)
        taken = [seconds_of(lambda: most_probable(run().logits), CPU) for _ in range(VISIT_STEPS)]
        return median(taken[UNTIMED_STEPS:])

    found: dict[str, list[float]] = {}
    for _ in trange(rounds, leave=False):
        stats = decoder.generate(answered, max_new_tokens=ANSWER).stats
        found.setdefault("plain tokens/s", []).append(stats.tokens_per_second)
        for nodes in NODES:
            before, took, after = map(visit, (1, nodes, 1))
            found.setdefault(f"{nodes} / plain", []).append(2 * took / (before + after))
        for tokens in PROMPTS:
            seconds = seconds_of(stepper_for(decoder, tokens).prefill, CPU)
            found.setdefault(f"prompt of {tokens}, s", []).append(seconds)
    return {name: median(numbers) for name, numbers in found.items()}


def loaded(target: str, dtype: str) -> Decoder:
    """A plain decoder of a model or of random weights."""
    if target not in SHAPES:
        return Decoder.from_pretrained(target, dtype=dtype)
    model = random_llama(target, CPU).model
    if dtype == "int8":
        to_int8(model)
    return Decoder.from_pretrained(model)


def first_token(target: str, dtype: str) -> dict[str, float]:
    """The most memory and the seconds of a process that writes one token."""
    words = ["generate", "--prompt", "Hello", "--max-new-tokens", "1"]
    words += ["--target", target, "--dtype", dtype]
    command = [sys.executable, "-m", "drafthead.scripts.cli", *words]
    ran = partial(subprocess.run, command, check=True, capture_output=True)
    seconds = seconds_of(ran, CPU)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"memory, GB": peak / 1e9, "first token, s": seconds}


def main(
    output: Annotated[Path, typer.Option(help="JSON file, to whose rows this run is added.")],
    target: Annotated[
        str, typer.Option(help="A model or, with random weights, one of " + ", ".join(SHAPES))
    ] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    kernels: Annotated[str, typer.Option(help="The set; by default this processor's.")] = "",
    rounds: Annotated[int, typer.Option(help="Of all measurements.")] = 15,
) -> None:
    """Measure, print all rows of the file and write it."""
    os.environ[VARIABLE] = kernels
    decoder = loaded(target, dtype)
    row: dict[str, Any] = dict(zip(RUN, (target, dtype, kernel_set()), strict=True))
    row |= measured(decoder, rounds)
    row |= {} if target in SHAPES else first_token(target, dtype)
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    rows = [each for each in rows if any(each[name] != row[name] for name in RUN)]
    write_json(output, {"rows": [*rows, row | about_run()]})
    cells = [
        [value if isinstance(value, str) else number(value, 3) for value in map(each.get, row)]
        for each in (*rows, row)
    ]
    print_table(Table("passes", list(row), cells))


if __name__ == "__main__":
    typer.run(main)
