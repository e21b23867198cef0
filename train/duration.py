"""How long a head is trained and in what portions."""

import math
from dataclasses import dataclass
from typing import Literal

from drafthead.heads.errors import UserError
from drafthead.train.run_folder import Progress


@dataclass(frozen=True)
class TrainConfig:
    """How long and in what portions a head is trained. Give one of epochs, steps and minutes."""

    output: str
    epochs: float | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    batch_rows: int = 16  # rows of an optimiser step, all processes together
    micro_batch_rows: int = 4  # rows that one process works on at a time
    mixed_precision: Literal["no", "bf16"] = "no"
    seed: int = 0
    save_every: int | None = None  # steps between states to resume from
    save_minutes: float = 10.0  # the same in minutes
    eval_every: int | None = None  # steps between evaluations; there is always one at the end
    overwrite: bool = False  # discard a finished run, or one with other settings, in `output`
    cpu: bool = False  # leave a GPU alone
    on_policy: bool = False  # at the end, train where decoding with the head would draft
    on_policy_share: float = 0.3  # of the budget, for that second stage

    def __post_init__(self) -> None:
        limits = [self.epochs, self.max_steps, self.max_minutes]
        if sum(limit is not None for limit in limits) != 1:
            raise ValueError("give exactly one of epochs, max_steps and max_minutes")
        counts = [self.batch_rows, self.micro_batch_rows, self.save_every, self.eval_every]
        if any(n is not None and n <= 0 for n in [*limits, *counts, self.save_minutes]):
            raise ValueError("all numbers but the seed must be positive")
        if not 0 < self.on_policy_share <= 1:
            raise ValueError(f"on_policy_share must lie in (0, 1], got {self.on_policy_share}")

    def accumulation(self, num_processes: int) -> int:
        """Micro-batches of a step in each process; raises UserError when rows would be left."""
        at_once = self.micro_batch_rows * num_processes
        if self.batch_rows % at_once:
            raise UserError(
                f"train.batch_rows={self.batch_rows} does not divide by train.micro_batch_rows="
                f"{self.micro_batch_rows} in {num_processes} process(es): use a multiple of "
                f"{at_once}"
            )
        return self.batch_rows // at_once


@dataclass(frozen=True)
class Duration:
    """When training ends: after so many steps, or after so many seconds."""

    limit: float
    unit: Literal["step", "s"]

    @classmethod
    def of(cls, config: TrainConfig, num_rows: int) -> "Duration":
        """The budget of a run over `num_rows` rows."""
        if config.max_minutes is not None:
            return cls(60 * config.max_minutes, "s")
        if config.max_steps is not None:
            return cls(config.max_steps, "step")
        assert config.epochs is not None
        return cls(max(1, math.ceil(config.epochs * num_rows / config.batch_rows)), "step")

    def done(self, progress: Progress) -> float:
        """How much of `limit` is used."""
        return progress.step if self.unit == "step" else progress.seconds

    def is_used(self, progress: Progress) -> bool:
        """Whether training is over."""
        return self.done(progress) >= self.limit

    def share_at_next_step(self, progress: Progress, step_seconds: float) -> float:
        """The share of the budget used when the next step, of about that length, is half done."""
        half = 0.5 if self.unit == "step" else step_seconds / 2
        return (self.done(progress) + half) / self.limit
