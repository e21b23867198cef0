"""Settings of what trains: of the rows that a target writes, and of a training run.

A run that resumes must have the same. This file imports no torch, so that the command line can list
options, and read a configuration before it imports what trains. The comment at a setting of a run,
or above it, is its help: see `train/run/listing.py`.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from drafthead.core.errors import UserError
from drafthead.core.settings import (
    BatchSize,
    Count,
    DtypeName,
    Flag,
    MaxNewTokens,
    Number,
    Positive,
    Seed,
    TargetName,
    Temperature,
    TopP,
    settings,
)


@settings(kw_only=True)
class AnsweringOptions:
    """Options of answering prompts."""

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
class DistillSettings(AnsweringOptions):
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
    """Options of inventing messages of users."""

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


@dataclass(frozen=True)
class TargetConfig:
    """The target model. Type `auto` is the stored one, and float32 without bf16 training."""

    name: str  # a folder, a GGUF file or a hub id
    dtype: str = "auto"  # number type of its weights
    trust_code: bool = False  # run code that comes with the model
    # Where its decoder layers are: docs/training.md, "Large targets".
    placement: Literal["whole", "auto", "fsdp"] | dict[str, int | str] = "whole"
    memory: dict[int | str, int | str] | None = None  # of each device that `auto` may use
    offload_folder: str | None = None  # for layers that cannot be read from the model's own files

    def __post_init__(self) -> None:
        if self.memory is not None and self.placement != "auto":
            raise ValueError("memory is for placement: auto alone")


@settings
class DataConfig:
    """The conversations, and the length of packed rows."""

    train: str | dict[str, float]  # a source, or several with their weights
    # To measure the head on; without it and `validation_share` it is not measured.
    validation: str | None = None
    # Share of the training conversations to measure on instead.
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    prompt_column: str | None = None  # that holds the user's text
    # Of the chat template, for rows that have none of their own.
    template_arguments: dict[str, Any] = field(default_factory=dict)
    strict: bool = False  # end at the first row that cannot be used, instead of leaving it out
    max_length: Annotated[int, Field(ge=2)] = 512  # tokens in a row
    max_validation: Count = 500  # conversations
    feature_folder: str | None = None  # keeps the target's features there after the first epoch
    feature_budget_gb: Positive | None = None  # of what is kept; the rest is computed each epoch

    def __post_init__(self) -> None:
        if self.feature_folder is None and self.feature_budget_gb is not None:
            raise ValueError("feature_budget_gb needs a feature_folder")
        if not self.sources or min(self.sources.values()) <= 0:
            raise ValueError("data.train needs a source, and weights above 0")

    @property
    def is_validated(self) -> bool:
        """Tell whether there is something to measure the head on."""
        return self.validation is not None or self.validation_share is not None

    @property
    def sources(self) -> dict[str, float]:
        """The sources of training data, and how often an epoch has each of their conversations."""
        return {self.train: 1.0} if isinstance(self.train, str) else self.train


@settings
class OptimizerConfig:
    """Optimiser, learning rates and schedule.

    `muon` orthogonalises the updates of hidden matrices (Jordan et al., 2024) and leaves
    embeddings, output heads, norms and biases to AdamW.
    """

    name: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices, and AdamW for the rest
    lr: Positive = 1e-3  # of AdamW, also beside Muon
    muon_lr: Positive = 0.02  # of Muon
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    max_grad_norm: float = 1.0  # longer gradients are scaled down to it
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # of the learning rates
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05  # of the duration
    final_lr_ratio: float = 0.0  # learning rate at the end, as a share of the highest


DURATIONS = ("epochs", "max_steps", "max_minutes")


@settings
class TrainConfig:
    """The length of training, and how often it is saved. Give one of epochs, steps, minutes."""

    output: str  # folder of the run
    epochs: Positive | None = None  # how often the data is read; give this or one of the next two
    max_steps: Count | None = None
    max_minutes: Positive | None = None
    batch_rows: Count = 16  # rows of an optimiser step, over all processes
    micro_batch_rows: Count = 4  # rows that a process computes at a time, at most
    mixed_precision: Annotated[
        Literal["auto", "no", "bf16"],
        BeforeValidator(lambda value: "no" if value is False else value),  # what YAML makes of it
    ] = "no"  # `auto`: bf16 on GPUs and on processors with instructions for it
    seed: int = 0  # of the order of rows and of new weights
    init_from: str | None = None  # a head of the same family and shape, whose weights to start with
    save_every: Count | None = None  # steps between saved states
    save_minutes: Positive = 10.0  # the same in minutes
    eval_every: Count | None = None  # steps between evaluations; there is always one at the end
    curve: bool = False  # evaluate after 1/8, 1/4 and 1/2 of the answers and after each epoch, too
    overwrite: bool = False  # discard a finished run, or one with other settings, in `output`
    cpu: bool = False  # use no GPU

    def __post_init__(self) -> None:
        limits = [self.epochs, self.max_steps, self.max_minutes]
        if sum(limit is not None for limit in limits) != 1:
            raise ValueError("give exactly one of epochs, max_steps and max_minutes")

    def shared_among(self, num_processes: int) -> "TrainConfig":
        """The settings in one of so many processes, which compute a step's rows in equal parts.

        Its `micro_batch_rows` is the largest that leaves no row over. Raises UserError where the
        processes cannot have equally many rows.
        """
        own, left = divmod(self.batch_rows, num_processes)
        if left:
            raise UserError(
                f"train.batch_rows={self.batch_rows} are the rows of a step, which {num_processes} "
                f"processes cannot share equally: use a multiple of {num_processes}"
            )
        fitting = [n for n in range(1, min(own, self.micro_batch_rows) + 1) if own % n == 0]
        return replace(self, micro_batch_rows=fitting[-1])

    def accumulation(self, num_processes: int) -> int:
        """Micro-batches of a step in each process, of settings that are shared among so many."""
        return self.batch_rows // (self.micro_batch_rows * num_processes)
