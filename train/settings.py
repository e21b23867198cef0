"""What decides the rows of a data set that a target writes: answers, and invented messages.

A run that resumes must have the same. This file imports no torch, so that the command line can list
options.
"""

from dataclasses import field
from typing import Annotated, Any

from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import (
    BatchSize,
    DtypeName,
    Flag,
    MaxNewTokens,
    Number,
    Seed,
    TargetName,
    Temperature,
    TopP,
    settings,
)


@settings(kw_only=True)
class Answering:
    """How prompts are answered."""

    max_new_tokens: MaxNewTokens = 256  # for each answer
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Annotated[Seed, Field(description="Each row's seed is made from this and its id.")] = 0
    # 16-bit targets round by batch.
    batch_size: Annotated[
        BatchSize,
        Field(description="Conversations at a time; 8 times as many are written together."),
    ] = 32
    end_repetition: Annotated[
        Flag, Field(description="End answers whose last 32 tokens occurred twice before.")
    ] = True
    drop_cut: Annotated[
        Flag, Field(description="Leave out rows with an answer that reached its limit.")
    ] = False


@settings
class DistillSettings(Answering):
    """Everything that decides the content of the rows.

    How many rows there are (a limit, samples) does not: a file can be continued to more of them.
    """

    target: str
    prompts: str
    prompt_column: str | None = None
    dtype: str = "auto"
    system: str | None = None  # message of conversations that have none of their own
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template
    server_model: str | None = None  # the name on a server; None: answered in this process

    def __post_init__(self) -> None:
        if self.system is not None and not self.system.strip():
            raise UserError("the system message is empty: leave --system out, or write one")


@settings(kw_only=True)
class Inventing:
    """How messages of users are invented."""

    system: Annotated[
        str | None, Field(description="System message instead of the template's own.")
    ] = None
    beginnings: Annotated[
        str | None,
        Field(
            description="Texts (as --prompts of distill) whose beginnings are continued; a base "
            "model needs them."
        ),
    ] = None
    max_new_tokens: MaxNewTokens = 256
    temperature: Annotated[Number, Field(gt=0, description="Lower is less varied.")] = 1.0
    top_p: TopP = 1.0
    seed: Annotated[Seed, Field(description="Same seed and settings, same file.")] = 0
    batch_size: BatchSize = 128
    dtype: DtypeName = "auto"


@settings
class InventSettings(Inventing):
    """Everything that decides the messages."""

    target: TargetName
    compile: bool = False
