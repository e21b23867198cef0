"""A whole profile of plain decoding and of a drafter, with progress bars."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafthead.core.sampling import SamplingConfig
from drafthead.infer.decoder import Decoder
from drafthead.lab.profiling.bandwidth import BandwidthBound, bandwidth_bound, weight_bytes
from drafthead.lab.profiling.pass_times import PassTimes, time_passes
from drafthead.lab.races.contestants import Ours
from drafthead.lab.races.ledger import StepLedger
from drafthead.lab.races.race import PLAIN, RaceTerms, in_batches, prepare, race

# Decoded when no prompts are given.
PROMPTS = (
    'def mean(values):\n    """The arithmetic mean of a list of numbers."""',
    "Explain in three sentences why the sky is blue.",
    'def read_lines(path):\n    """All lines of a text file, without line ends."""',
    "Write a short letter that asks a landlord to repair the heating.",
)


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


def measured_profile(
    decoder: Decoder, name: str, prompts: Sequence[list[int]], terms: RaceTerms
) -> Profile:
    """Everything that is measured of plain decoding and, as `name`, of the drafter."""
    target, batch = decoder.target, terms.batch_size
    sampling = SamplingConfig(terms.temperatures[0])
    ways = [Ours(PLAIN, "none", sampling, Decoder(target))]
    if decoder.drafter is not None:
        ways.append(Ours(name, name, sampling, decoder))
    batches = in_batches(prompts, batch)
    started = time.perf_counter()
    for way in ways:
        prepare(way, batches[0], terms.max_new_tokens, terms.seed)
    warm_up_seconds = time.perf_counter() - started
    records = race(ways, batches, terms.rounds, terms.max_new_tokens, terms.seed)
    ledgers = {record.contestant.mode: record.ledger() for record in records}
    return Profile(
        ledgers,
        time_passes(target, decoder.drafter, batch),
        bandwidth_bound(target, batch, ledgers[PLAIN].step_seconds),
        {n: weight_bytes(target, round(batch * ledger.nodes)) for n, ledger in ledgers.items()},
        warm_up_seconds,
        # Compiling the target's passes, which warming up includes.
        target.backend.seconds,
        on_gpu=target.device.type == "cuda",
    )
