"""`drafthead profile`: where the time of a step goes, and how far memory would let it go."""

import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.decoder import DEFAULT_CHAIN
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.measuring.bandwidth import bandwidth_bound, weight_bytes
from drafthead.infer.measuring.ledger import keep_ledgers
from drafthead.infer.measuring.pass_times import (
    ROUNDS,
    STEPS,
    WARM_UP,
    PassTimes,
    StepOverhead,
    step_overhead,
    time_passes,
)
from drafthead.infer.request.prompts import encode
from drafthead.scripts import options
from drafthead.scripts.measuring import describe_run, prompt_ids
from drafthead.scripts.reports.profiling import Profile, print_profile, write_profile

# What is decoded when no prompts are given.
PROMPTS = (
    'def mean(values):\n    """The arithmetic mean of a list of numbers."""',
    "Explain in three sentences why the sky is blue.",
    'def read_lines(path):\n    """All lines of a text file, without line ends."""',
    "Write a short letter that asks a landlord to repair the heating.",
)
WARM_UP_TOKENS = 16
SIZE_OF_INTEREST = 16  # nodes of the tree that is taken apart when none is given


def main(
    target: options.TargetName,
    head: options.HeadFolder = None,
    draft_model: options.DraftModelName = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    prompts: Annotated[
        str | None,
        typer.Option(help="JSONL, Parquet or data set; without it, a few prompts of our own."),
    ] = None,
    limit: options.PromptLimit = 8,
    batch: options.BatchSize = 1,
    tree_nodes: options.TreeNodes = None,
    draft_tokens: options.DraftTokens = DEFAULT_CHAIN,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    compile: options.CompileSwitch = False,
    output: Annotated[Path | None, typer.Option(help="Folder for profile.json.")] = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
) -> None:
    """Take a decoding step apart, plainly and with a drafter.

    The ledger: milliseconds of drafting, verifying, accepting and committing in an
    average step, and of the host around them. Passes alone: the target over 1 to 64 tokens and the
    drafter at its sizes, outside the engine; as long as the first hardly grows, larger trees are
    nearly free. Memory: each step reads all weights, so the speed of copying bounds it.
    At most one of --head, --draft-model and --prompt-lookup; with none, plain decoding alone.
    """
    if limit < 1 or batch < 1:
        raise UserError(f"--limit and --batch must be at least 1, got {limit} and {batch}")
    decoder = Decoder.from_pretrained(
        target, head, draft_model, prompt_lookup, tree_nodes, draft_tokens, dtype, device,
        compile=compile,
    )  # fmt: skip
    plain = Decoder(decoder.target)
    decoders = {"plain": plain}
    if decoder.drafter is not None:
        decoders[head.name if head else "draft model" if draft_model else "prompt lookup"] = decoder
    ids = (
        prompt_ids(prompts, limit, plain, max_new_tokens)
        if prompts
        else encode(PROMPTS[:limit], plain.tokenizer)
    )
    batches = in_batches(ids, batch)
    warm_up_seconds = warm_up(decoders, batches[0], max_new_tokens, temperature)
    with tqdm(total=len(batches) * len(decoders), desc="decoding", unit="batch") as bar:
        ledgers = keep_ledgers(decoders, batches, max_new_tokens, temperature, seed, bar.update)
    profile = Profile(
        ledgers,
        passes_alone(decoder, batch),
        overhead_of(decoder, batches[0], tree_nodes),
        bandwidth_bound(decoder.target, batch, ledgers["plain"].step_seconds),
        {
            name: weight_bytes(decoder.target, round(batch * ledger.nodes))
            for name, ledger in ledgers.items()
        },
        warm_up_seconds,
        compile_seconds(decoder.target),
        on_gpu=decoder.target.device.type == "cuda",
    )
    print_profile(profile)
    if output is not None:
        about = {
            **describe_run(target, decoder.target),
            "prompts": len(ids),
            "batch": batch,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "compiled": compile,
        }
        write_profile(profile, about, output)


def in_batches(ids: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Batches of one size; the last is filled from the start again.

    Prompts a b c in batches of 2 are (a b) (c a).
    """
    count = -(-len(ids) // size)
    again = cycle(ids)
    return [list(islice(again, size)) for _ in range(count)]


def warm_up(
    decoders: Mapping[str, Decoder], prompts: list[list[int]], most: int, temperature: float
) -> float:
    """Decode a few tokens with each decoder, as a batch and as a single row, as which a batch ends;
    seconds. This is where passes are compiled and the planner times its steps.
    """
    started = time.perf_counter()
    for decoder in tqdm(decoders.values(), desc="warming up", unit="decoder"):
        for rows in (prompts, prompts[:1]):
            decoder.generate(rows, min(WARM_UP_TOKENS, most), temperature)
    return time.perf_counter() - started


def passes_alone(decoder: Decoder, batch: int) -> PassTimes:
    """Target and drafter outside the engine, with a progress bar."""
    with tqdm(total=WARM_UP + ROUNDS, desc="passes alone", unit="round") as bar:
        return time_passes(decoder.target, decoder.drafter, batch, on_round=bar.update)


def overhead_of(
    decoder: Decoder, prompts: list[list[int]], tree_nodes: int | None
) -> StepOverhead | None:
    """A step at one size, taken apart: the size that was asked for, or one near 16 nodes."""
    drafter = decoder.drafter
    if drafter is None:
        return None
    assert decoder.budget is not None
    nearest = min(drafter.budgets, key=lambda budget: abs(budget.nodes - SIZE_OF_INTEREST))
    budget = decoder.budget if tree_nodes else nearest
    with tqdm(total=WARM_UP + STEPS, desc="step and its passes", unit="step") as bar:
        return step_overhead(decoder.target, drafter, budget, prompts, on_step=bar.update)


def compile_seconds(target: Target) -> float:
    """Time spent on compiling the target's passes."""
    return target.compile_seconds if isinstance(target, CompiledTarget) else 0.0
