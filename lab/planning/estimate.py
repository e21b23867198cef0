"""What a training run holds in memory, and what it writes, by the sizes of its weights.

The target and the head have shapes and no numbers: of the target only `config.json` is read, and
its tokenizer if it has one. What comes and goes within a step is not counted: `trial` measures it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from drafthead.core.errors import UserError, first_line
from drafthead.core.target.gguf_files import model_folder
from drafthead.core.target.loading import decoder_class, dtype_named, has_encoder, load_tokenizer
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import BITSANDBYTES
from drafthead.heads.base import DraftHead
from drafthead.train.data.packing import PackedData
from drafthead.train.data.training_rows import training_data
from drafthead.train.draft_models.student import Student
from drafthead.train.features.kept import feature_bytes
from drafthead.train.features.reading import TargetConfig, check_row_length, dtype_for
from drafthead.train.optimizers import build_optimizers
from drafthead.train.run.config import RunConfig
from drafthead.train.run.folder import KEPT_STATES
from drafthead.train.run.trainables import trainable

TARGET, HEAD, GRADIENTS = "target: weights", "head: weights", "head: gradients"
OPTIMISER, AVERAGE = "optimiser: state", "average of weights (ema)"
FEATURES = "target's features"
LIBRARIES, BUFFERS = "Python and libraries", "gradients that processes exchange"
SMALLER_DRAFT_VOCABULARY = 8192


@dataclass(frozen=True)
class Setup:
    """A run's target and head without numbers."""

    config: RunConfig
    target: Target
    head: DraftHead
    rows: PackedData | None  # None without a tokenizer or without data

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that are trained."""
        return [weight for weight in self.head.parameters() if weight.requires_grad]


@dataclass(frozen=True)
class DiskUse:
    """Bytes, without the headers of the files: less than 1 kB for each tensor."""

    state: int  # one saved state
    head: int

    @property
    def states(self) -> int:
        """The states of a run at most: those that are kept, and one that is being written."""
        return (KEPT_STATES + 1) * self.state


def set_up(config: RunConfig, has_data: bool = True) -> Setup:
    """Set up the run of a configuration; UserError for what training would refuse."""
    with torch.device("meta"):
        target = target_without_numbers(config.target, config.train.mixed_precision)
        family = trainable(config.family)
        head = family(family.sized(config.head, target))
    check_row_length(target, config.target.name, config.data.max_length)
    rows = None
    if has_data and target.tokenizer is not None:
        seed = config.train.seed
        rows = training_data(config.data, target.tokenizer, seed, target.vocab_size)[0]
    return Setup(config, target, head, rows)


def target_without_numbers(config: TargetConfig, mixed_precision: str) -> Target:
    """The target; UserError where its sizes do not follow from `config.json`."""
    wanted = dtype_for(config, mixed_precision)
    if config.placement != "whole" or wanted in BITSANDBYTES:
        raise UserError(
            f"target.placement={config.placement} with target.dtype={wanted} cannot be planned: "
            "only targets that are whole on their device, in numbers of 16 or 32 bits"
        )
    source = model_folder(config.name)
    Target.check_kind(config.name, has_encoder(source, config.trust_code))
    try:
        shape = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_code)
    except Exception as error:  # transformers raises many kinds for a bad folder
        raise UserError(f"cannot read config.json of {config.name}: {first_line(error)}") from error
    if getattr(shape, "quantization_config", None) is not None:
        raise UserError(
            f"{config.name} has quantised weights, whose sizes do not follow from its config.json: "
            "plan with the model that it was made from"
        )
    stored = shape.dtype or torch.float32
    model = decoder_class(shape).from_config(
        shape,
        dtype=stored if wanted == "auto" else dtype_named(wanted),
        trust_remote_code=config.trust_code,
    )
    model.eval().requires_grad_(False)
    return Target(model, load_tokenizer(source, str(source), config.trust_code))


def held_memory(setup: Setup, processes: int, libraries: int) -> dict[str, int]:
    """The bytes of one of the processes throughout a step, by part.

    On a CPU `libraries` are the bytes of a process that has imported all and done nothing, else 0.
    """
    train, target = setup.config.train, setup.target
    positions = train.micro_batch_rows * setup.config.data.max_length
    gradients = bytes_of(setup.trained)
    head = bytes_of((*setup.head.parameters(), *setup.head.buffers()))
    parts = {
        TARGET: bytes_of((*target.model.parameters(), *target.model.buffers())),
        HEAD: head,
        GRADIENTS: gradients,
        OPTIMISER: optimizer_bytes(setup),
        AVERAGE: 0 if train.ema is None else head,
        FEATURES: positions
        * feature_bytes(setup.head.features_needed, target.hidden_size, target.dtype),
        BUFFERS: gradients if processes > 1 else 0,
        LIBRARIES: libraries,
    }
    return {part: size for part, size in parts.items() if size}


def optimizer_bytes(setup: Setup) -> int:
    """The bytes of the optimisers' states: Muon has a momentum, AdamW two moments and a count."""
    total = 0
    for optimizer in build_optimizers(setup.head.named_parameters(), setup.config.optimizer):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        is_muon = isinstance(optimizer, torch.optim.Muon)
        total += bytes_of(weights) if is_muon else 2 * bytes_of(weights) + 4 * len(weights)
    return total


def less_memory(setup: Setup) -> list[str]:
    """Settings of this configuration that would need less memory, those that cost least first."""
    config, head, target = setup.config, setup.config.head, setup.target
    rows, bf16 = config.train.micro_batch_rows, config.train.mixed_precision == "bf16"
    draft = getattr(head, "draft_vocab_size", None)
    smaller = min(SMALLER_DRAFT_VOCABULARY, (draft or target.vocab_size) // 2)
    possible: list[tuple[bool, str, Any]] = [
        (rows > 1, "train.micro_batch_rows", 1),
        (config.data.max_length > 2, "data.max_length", config.data.max_length // 2),
        (draft is not None, "head.draft_vocab_size", smaller),
        (getattr(head, "output", None) == "own", "head.output", "shared"),
        (not bf16, "train.mixed_precision", "bf16"),
        (bf16 and target.dtype.itemsize > 2, "target.dtype", "bfloat16"),
        (config.train.ema is not None, "train.ema", "null"),
        (config.optimizer.name == "adamw", "optimizer.name", "muon"),
    ]
    return [f"{name}={value}" for applies, name, value in possible if applies]


def disk_use(setup: Setup) -> DiskUse:
    """Return what the run will write."""
    weights = list(setup.head.state_dict().values())
    average = bytes_of(weights) if setup.config.train.ema is not None else 0
    dtype = torch.bfloat16 if isinstance(setup.head, Student) else setup.target.dtype
    return DiskUse(bytes_of(weights) + average + optimizer_bytes(setup), bytes_of(weights, dtype))


def bytes_of(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> int:
    """The bytes of tensors [...], each storage once; `dtype` is the type that numbers get."""
    unique = {tensor.untyped_storage(): tensor for tensor in tensors}.values()
    return sum(
        tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in unique
    )
