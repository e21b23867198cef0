"""When training ends, counted in steps or in seconds."""

import math
from dataclasses import dataclass
from typing import Literal

from drafthead.train.run.config import TrainConfig
from drafthead.train.run.saved_states import Progress


@dataclass(frozen=True)
class Duration:
    """How long training lasts: a number of steps, or of seconds."""

    limit: float
    unit: Literal["step", "s"]

    @classmethod
    def of(cls, config: TrainConfig, num_rows: int) -> "Duration":
        """The duration of a run over `num_rows` rows."""
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
        """The share of the duration used when the next step, of about that length, is half done."""
        half = 0.5 if self.unit == "step" else step_seconds / 2
        return (self.done(progress) + half) / self.limit
