"""What decides the rows of a distillation: the settings that its manifest holds."""

from dataclasses import dataclass, field
from typing import Any

from drafthead.heads.errors import UserError


@dataclass(frozen=True)
class DistillSettings:
    """Everything that decides the content of the rows; a resumed run must have the same.

    How many rows there are (a limit, samples) does not: a file can be continued to more of them.
    """

    target: str
    prompts: str
    max_new_tokens: int = 256  # for each answer
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    prompt_column: str | None = None
    dtype: str = "auto"
    batch_size: int = 32  # conversations decoded together; 16-bit targets round by batch
    end_repetition: bool = True  # end answers that only repeat themselves: `EndlessRepetition`
    system: str | None = None  # message of conversations that have none of their own
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template
    drop_cut: bool = False  # leave out rows with an answer that reached its limit
    server_model: str | None = None  # the name on a server; None: answered in this process

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise UserError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.batch_size < 1:
            raise UserError(f"the batch size must be at least 1, got {self.batch_size}")
        if self.system is not None and not self.system.strip():
            raise UserError("the system message is empty: leave --system out, or write one")
