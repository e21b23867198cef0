"""`drafthead profile`: how the time of a step is spent, and what memory bandwidth allows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from drafthead.backends.compiled_target import CompiledTarget
from drafthead.infer import Decoder
from drafthead.infer.request.prompts import encode
from drafthead.lab.profiling.bandwidth import bandwidth_bound, weight_bytes
from drafthead.lab.profiling.ledger import measure_ledgers
from drafthead.lab.profiling.pass_times import time_passes
from drafthead.lab.races.record import describe_run, prompt_ids
from drafthead.lab.reports.profiling import Profile, profile_report
from drafthead.scripts import options

# Decoded when no prompts are given.
PROMPTS = (
    'def mean(values):\n    """The arithmetic mean of a list of numbers."""',
    "Explain in three sentences why the sky is blue.",
    'def read_lines(path):\n    """All lines of a text file, without line ends."""',
    "Write a short letter that asks a landlord to repair the heating.",
)
WARM_UP_TOKENS = 16


def main(
    target: options.TargetName,
    head: options.HeadName = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    datastore: options.DatastoreFolder = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSONL, Parquet or data set; a few built-in prompts by default."),
    ] = None,
    limit: options.PromptLimit = 8,
    batch: options.BatchSize = 1,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    compile: options.CompileSwitch = False,
    output: Annotated[Path | None, typer.Option(help="Folder for profile.json.")] = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
) -> None:
    """Split the time of a decoding step, plainly and with a drafter.

    The ledger: milliseconds of drafting, verifying, accepting and committing in an average step,
    and of the Python code around them. Passes alone: the target over 1 to 64 tokens and the drafter
    at its sizes, outside the engine; as long as the first hardly grows, larger trees are nearly
    free. Memory: each step reads all weights, so the speed of copying is a bound.
    --head, --draft-model or --draft-layers; --prompt-lookup or --datastore alone or beside one of
    them; with none, plain decoding alone.
    """
    draft = options.draft_names(head, draft_model, draft_layers, prompt_lookup, datastore)
    decoder = Decoder.from_pretrained(
        target, draft, tree_nodes, draft_tokens, dtype=dtype, device=device, compile=compile
    )
    kinds = {
        "draft model": draft_model, "own layers": draft_layers, "datastore": datastore,
        "prompt lookup": prompt_lookup,
    }  # fmt: skip
    name = head.name if head else next((kind for kind, given in kinds.items() if given), "none")
    ids = profiled_prompts(prompts, limit, decoder, max_new_tokens)
    workload = Workload(ids, batch, max_new_tokens, temperature, seed)
    profile = measured_profile(decoder, name, workload)
    about = {**describe_run(target, decoder.target), **workload.settings, "compiled": compile}
    report = profile_report(profile, about)
    report.show()
    if output is not None:
        report.write(output / "profile.json")


@dataclass(frozen=True)
class Workload:
    """What is decoded, and how."""

    prompts: list[list[int]]
    batch: int  # prompts that are decoded together
    max_new_tokens: int
    temperature: float
    seed: int

    @property
    def settings(self) -> dict[str, float]:
        """What is recorded next to the numbers."""
        return {
            "prompts": len(self.prompts),
            "batch": self.batch,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }


def profiled_prompts(
    source: str | None, limit: int, decoder: Decoder, max_new_tokens: int
) -> list[list[int]]:
    """Token ids of the user's prompts, or of a few built-in ones."""
    if source is None:
        return encode(PROMPTS[:limit], decoder.tokenizer)
    return prompt_ids(source, limit, decoder, max_new_tokens)


def measured_profile(decoder: Decoder, name: str, workload: Workload) -> Profile:
    """Everything that is measured of plain decoding and, as `name`, of the drafter."""
    target, batch = decoder.target, workload.batch
    decoders = {"plain": Decoder(target)}
    if decoder.drafter is not None:
        decoders[name] = decoder
    batches = in_batches(workload.prompts, batch)
    most, temperature = workload.max_new_tokens, workload.temperature
    warm_up_seconds = warm_up(decoders, batches[0], most, temperature)
    ledgers = measure_ledgers(decoders, batches, most, temperature, workload.seed)
    return Profile(
        ledgers,
        time_passes(target, decoder.drafter, batch),
        bandwidth_bound(target, batch, ledgers["plain"].step_seconds),
        {n: weight_bytes(target, round(batch * ledger.nodes)) for n, ledger in ledgers.items()},
        warm_up_seconds,
        # Compiling the target's passes, which warming up includes.
        target.compile_seconds if isinstance(target, CompiledTarget) else 0.0,
        on_gpu=target.device.type == "cuda",
    )


def in_batches(ids: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Batches of one size; the last is filled up from the start.

    Prompts a b c in batches of 2 are (a b) (c a).
    """
    count = -(-len(ids) // size)
    again = cycle(ids)
    return [list(islice(again, size)) for _ in range(count)]


def warm_up(
    decoders: Mapping[str, Decoder], prompts: list[list[int]], most: int, temperature: float
) -> float:
    """Warm up each decoder and decode a few tokens with it; returns seconds."""
    started = time.perf_counter()
    # For a batch, and for a single row, because a batch is one when its other rows have ended.
    for decoder in tqdm(decoders.values(), desc="warming up", unit="decoder"):
        decoder.warm_up((len(prompts), 1), temperature=temperature)
        for rows in (prompts, prompts[:1]):
            decoder.generate(
                rows, max_new_tokens=min(WARM_UP_TOKENS, most), temperature=temperature
            )
    return time.perf_counter() - started
