"""What a run will need of memory and disk, and which settings would save memory."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from drafthead.core.errors import UserError
from drafthead.lab.planning.dry_run import Ledger
from drafthead.lab.planning.dry_setup import DrySetup, dry_setup
from drafthead.train.draft_models.student import Student
from drafthead.train.features.kept import feature_bytes
from drafthead.train.features.reading import read_features
from drafthead.train.learning.step import LossModule
from drafthead.train.optimizers import build_optimizers
from drafthead.train.run.folder import KEPT_STATES

TARGET, HEAD, GRADIENTS = "target: weights", "head: weights", "head: gradients"
OPTIMISER, AVERAGE = "optimiser: state", "average of weights (ema)"
PASS, FORWARD = "target's pass and features", "head's forward pass and losses"
BACKWARD, UPDATE = "backward pass", "optimiser's step"
LIBRARIES, ALLOCATOR = "Python and libraries", "work of operations, gaps, data"
BUFFERS = "gradients that processes exchange"
# On a CPU operations need memory inside themselves, and what is freed is not all given back: a part
# of what comes and goes in a step. Fitted to nine runs; a slow test holds a run to 15 %.
GAPS_SHARE, DATA_BYTES = 0.6, 95_000_000
SMALLER_DRAFT_VOCABULARY = 8192


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step, by part."""

    held: dict[str, int]  # throughout: weights, gradients, optimiser's state, average
    peak: Counter[str]  # when they are most; what comes and goes is named after its phase
    optimizers: list[torch.optim.Optimizer]
    average: nn.Module | None


@dataclass(frozen=True)
class Place:
    """Where a run is to happen."""

    processes: int
    on_cpu: bool
    libraries: int  # bytes of a process that has imported all and done nothing


@dataclass(frozen=True)
class Remedy:
    """A setting that needs less memory, and what a process needs with it."""

    setting: str
    total: int


@dataclass(frozen=True)
class DiskUse:
    """Bytes, without the headers of the files: less than 1 kB for each tensor."""

    state: int  # one saved state
    head: int
    features: int  # that are kept after the first epoch; 0 without a folder
    feature_rows: int  # of which they are

    @property
    def states(self) -> int:
        """The states of a run at most: those that are kept, and one that is being written."""
        return (KEPT_STATES + 1) * self.state


def step_memory(setup: DrySetup, processes: int = 1) -> StepMemory:
    """The memory of an optimiser step of one process, by a step without numbers."""
    config, head, target, tokens = setup.config, setup.head, setup.target, setup.tokens
    precision = config.train.mixed_precision
    phase = TARGET  # names what is new, see `label`
    gradients = {tuple(weight.shape) for weight in trained(head)}

    def label(tensor: torch.Tensor) -> str:
        return GRADIENTS if phase == BACKWARD and tuple(tensor.shape) in gradients else phase

    ledger = setup.dry.ledger = Ledger(label)
    for tensor in (*target.model.parameters(), *target.model.buffers()):
        ledger.add(tensor)
    phase = HEAD
    for tensor in (*head.parameters(), *head.buffers()):
        ledger.add(tensor)
    with setup.dry:
        phase = OPTIMISER
        optimizers = build_optimizers(head.named_parameters(), config.optimizer)
        for weight in trained(head):
            weight.grad = torch.zeros_like(weight)
        # Optimisers make their states in their first step, so one is made before anything counts.
        update(optimizers)
        phase, average = AVERAGE, None
        if config.train.ema is not None:
            average = type(head)(head.config)  # in float32, as `WeightAverage` keeps it
        held = dict(ledger.live)
        held[GRADIENTS] = sum(w.numel() * w.element_size() for w in trained(head))
        ledger.begin_peak()
        # In the second micro-batch the gradients of the first are there as well.
        for _ in range(min(2, config.train.accumulation(processes))):
            phase = PASS
            batch = read_features(target, tokens, head.features_needed, precision)
            phase = FORWARD
            total, _ = LossModule(head, target, precision)(batch)
            phase = BACKWARD
            total.backward()
        phase = UPDATE
        nn.utils.clip_grad_norm_(head.parameters(), config.optimizer.max_grad_norm)
        update(optimizers)
    return StepMemory(held, ledger.at_peak, optimizers, average)


def trained(head: nn.Module) -> list[nn.Parameter]:
    """The weights that are trained."""
    return [weight for weight in head.parameters() if weight.requires_grad]


def update(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """A step of each optimiser, after which there are no gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def process_memory(memory: StepMemory, place: Place) -> Counter[str]:
    """The parts of one process at its peak, by bytes."""
    parts = Counter(memory.peak)
    if place.processes > 1:
        parts[BUFFERS] = memory.held[GRADIENTS]
    if place.on_cpu:
        passing = parts.total() - sum(parts[name] for name in memory.held)
        parts[LIBRARIES] = place.libraries
        parts[ALLOCATOR] = DATA_BYTES + round(GAPS_SHARE * passing)
    return parts


def remedies(setup: DrySetup, place: Place) -> list[Remedy]:
    """Settings that would save memory, those that cost least first; each one alone."""
    found = []
    for section, key, value in possible_changes(setup):
        changed = replace(getattr(setup.config, section), **{key: value})
        try:
            changed_config = replace(setup.config, **{section: changed})
            there = dry_setup(changed_config, setup.rows, has_data=setup.rows is not None)
            memory = step_memory(there, place.processes)
        except UserError:  # the value does not go with the others
            continue
        written = "null" if value is None else value
        total = process_memory(memory, place).total()
        found.append(Remedy(f"{section}.{key}={written}", total))
    return found


def possible_changes(setup: DrySetup) -> list[tuple[str, str, Any]]:
    """Section, setting and value of what may be changed in this configuration."""
    config, head, target = setup.config, setup.config.head, setup.target
    rows, bf16 = config.train.micro_batch_rows, config.train.mixed_precision == "bf16"
    draft = getattr(head, "draft_vocab_size", None)
    smaller = min(SMALLER_DRAFT_VOCABULARY, (draft or target.vocab_size) // 2)
    possible: list[tuple[bool, str, str, Any]] = [
        *((rows % n == 0, "train", "micro_batch_rows", n) for n in range(rows - 1, 0, -1)),
        (config.data.max_length > 2, "data", "max_length", config.data.max_length // 2),
        (draft is not None, "head", "draft_vocab_size", smaller),
        (getattr(head, "output", None) == "own", "head", "output", "shared"),
        (not bf16, "train", "mixed_precision", "bf16"),
        (bf16 and target.dtype.itemsize > 2, "target", "dtype", "bfloat16"),
        (config.train.ema is not None, "train", "ema", None),
        (config.optimizer.name == "adamw", "optimizer", "name", "muon"),
    ]
    return [(section, key, value) for applies, section, key, value in possible if applies]


def disk_use(setup: DrySetup, memory: StepMemory) -> DiskUse:
    """What the run of a dry setup will write."""
    weights = list(setup.head.state_dict().values())
    states = [v for o in memory.optimizers for values in o.state.values() for v in values.values()]
    average = [] if memory.average is None else [*memory.average.state_dict().values()]
    state = bytes_of(weights) + bytes_of(average)
    state += bytes_of(value for value in states if isinstance(value, torch.Tensor))
    dtype = torch.bfloat16 if isinstance(setup.head, Student) else setup.target.dtype
    rows, features = kept_features(setup)
    return DiskUse(state, bytes_of(weights, dtype), features, rows)


def kept_features(setup: DrySetup) -> tuple[int, int]:
    """How many rows' features are kept, and their bytes."""
    data, target, spec = setup.config.data, setup.target, setup.head.features_needed
    if data.feature_folder is None or setup.rows is None:
        return 0, 0
    size = feature_bytes(spec, target.hidden_size, target.dtype, data.feature_dtype == "int8")
    lengths = [setup.rows.row_length(row) for row in range(len(setup.rows.rows))]
    budget = 1e9 * (data.feature_budget_gb or float("inf"))
    totals = [total for total in accumulate(size * n for n in lengths) if total <= budget]
    return len(totals), totals[-1] if totals else 0


def bytes_of(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> int:
    """The bytes of tensors [...], each storage once; `dtype` is the type that numbers get."""
    unique = {tensor.untyped_storage(): tensor for tensor in tensors}.values()
    return sum(
        tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in unique
    )
