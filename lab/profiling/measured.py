"""A whole profile of plain decoding and of a drafter, with progress bars."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from tqdm import tqdm

from drafthead.backends.compiled_target import CompiledTarget
from drafthead.infer import Decoder
from drafthead.lab.profiling.bandwidth import BandwidthBound, bandwidth_bound, weight_bytes
from drafthead.lab.profiling.ledger import StepLedger, measure_ledgers
from drafthead.lab.profiling.pass_times import (
    PassTimes,
    time_passes,
)

# Decoded when no prompts are given.
PROMPTS = (
    'def mean(values):\n    """The arithmetic mean of a list of numbers."""',
    "Explain in three sentences why the sky is blue.",
    'def read_lines(path):\n    """All lines of a text file, without line ends."""',
    "Write a short letter that asks a landlord to repair the heating.",
)
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Profile:
    """All that was measured of a target, plainly and with a drafter."""

    ledgers: Mapping[str, StepLedger]  # by decoder; "plain" is one of them
    passes: PassTimes
    bandwidth: BandwidthBound
    weight_bytes: Mapping[str, int]  # read by a verify pass, by decoder
    warm_up_seconds: float
    compile_seconds: float  # of the target's passes
    on_gpu: bool

    def weight_rate(self, name: str) -> float | None:
        """Bytes of weights per second of verifying; None on a GPU, where kernels end later."""
        verify = self.ledgers[name].seconds["verify"]
        return None if self.on_gpu else self.weight_bytes[name] / verify


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
