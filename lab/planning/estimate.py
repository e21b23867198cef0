"""The memory that a run will need in each of its processes, and which settings would save some."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from drafthead.heads.errors import UserError
from drafthead.lab.planning.dry_setup import DrySetup, dry_setup
from drafthead.lab.planning.shares import Engine, shared
from drafthead.lab.planning.step_memory import DryStep, StepMemory
from drafthead.train.data.packing import TokenBatch

LIBRARIES, ALLOCATOR = "Python and libraries", "work of operations, gaps, data"
# On a CPU operations need memory inside themselves, and what is freed is not all given back: a part
# of what comes and goes in a step. Fitted to nine runs; docs/training.md has others beside them.
GAPS_SHARE, DATA_BYTES = 0.6, 80_000_000
SMALLER_DRAFT_VOCABULARY = 8192


@dataclass(frozen=True)
class Place:
    """Where a run is to happen."""

    engine: Engine
    processes: int
    on_cpu: bool
    libraries: int  # bytes of a process that has done nothing yet; 0 on a GPU


@dataclass(frozen=True)
class Estimate:
    """The parts of one process's memory at its peak, by bytes."""

    parts: Counter[str]
    memory: StepMemory

    @property
    def total(self) -> int:
        """All of them."""
        return self.parts.total()


@dataclass(frozen=True)
class Remedy:
    """A setting that needs less memory, and what a process needs with it."""

    setting: str
    total: int


def estimate(setup: DrySetup, place: Place) -> Estimate:
    """The memory of one process."""
    memory = DryStep(setup).run(place.processes)
    precision = setup.config.train.mixed_precision
    parts = shared(memory, memory.peak, place.engine, place.processes, precision)
    if place.on_cpu:
        passing = parts.total() - sum(parts[name] for name in memory.held)
        parts[LIBRARIES] = place.libraries
        parts[ALLOCATOR] = DATA_BYTES + round(GAPS_SHARE * passing)
    return Estimate(parts, memory)


def remedies(setup: DrySetup, place: Place) -> list[Remedy]:
    """Settings that would save memory, those that cost least first; each one alone."""
    changes = [*smaller_batches(setup), *other_settings(setup, place)]
    return [Remedy(setting, estimate(changed, place).total) for setting, changed in changes]


def smaller_batches(setup: DrySetup) -> list[tuple[str, DrySetup]]:
    """Fewer rows at a time, in as many more micro-batches; then shorter rows."""
    config, rows = setup.config, setup.config.train.micro_batch_rows
    found = []
    for fewer in (n for n in range(rows - 1, 0, -1) if rows % n == 0):
        smaller = replace(config, train=replace(config.train, micro_batch_rows=fewer))
        changed = replace(setup, config=smaller, tokens=part(setup.tokens, rows=fewer))
        found.append((f"train.micro_batch_rows={fewer}", changed))
    length = config.data.max_length // 2
    if length > 1:
        changed = replace(setup, tokens=part(setup.tokens, length=length))
        found.append((f"data.max_length={length}", changed))
    return found


def part(tokens: TokenBatch, rows: int | None = None, length: int | None = None) -> TokenBatch:
    """The first rows and positions of a batch [B, T]."""
    here = (slice(rows), slice(length))
    return TokenBatch(tokens.input_ids[here], tokens.segments[here], tokens.supervised[here])


def other_settings(setup: DrySetup, place: Place) -> list[tuple[str, DrySetup]]:
    """Settings that change what is trained, or how exactly."""
    found = []
    for section, key, value in possible_changes(setup, place):
        changed = replace(getattr(setup.config, section), **{key: value})
        try:
            config = replace(setup.config, **{section: changed})
            written = "null" if value is None else value
            found.append((f"{section}.{key}={written}", dry_setup(config)))
        except UserError:  # the value does not go with the others
            continue
    return found


def possible_changes(setup: DrySetup, place: Place) -> list[tuple[str, str, Any]]:
    """Section, setting and value of what may be changed in this configuration."""
    config, head, target = setup.config, setup.config.head, setup.target
    bf16 = config.train.mixed_precision == "bf16"
    draft = getattr(head, "draft_vocab_size", None)
    smaller = min(SMALLER_DRAFT_VOCABULARY, (draft or target.vocab_size) // 2)
    possible: list[tuple[bool, str, str, Any]] = [
        (draft is not None, "head", "draft_vocab_size", smaller),
        (getattr(head, "output", None) == "own", "head", "output", "shared"),
        (not bf16, "train", "mixed_precision", "bf16"),
        (bf16 and target.dtype.itemsize > 2, "target", "dtype", "bfloat16"),
        (config.train.ema is not None, "train", "ema", None),
        (config.optimizer.name == "adamw" and place.engine == "ddp", "optimizer", "name", "muon"),
    ]
    return [(section, key, value) for applies, section, key, value in possible if applies]
