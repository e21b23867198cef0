"""One optimiser step: the target's features, the head's loss and its gradients.

The loss of a step is the mean over the supervised tokens of all its rows, however they are shared
among micro-batches and processes: their number does not change what is learnt. (But each of them
draws the noise of EAGLE-1 and -2 and Hydra's dropout itself.)
"""

import time
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.layers.tiled_attention import TiledAttention
from drafthead.heads.objectives.batch import HeadBatch, HeadLoss
from drafthead.train.data.packing import PackedData
from drafthead.train.data.training_rows import Sources
from drafthead.train.features.kept import KeptFeatures
from drafthead.train.features.reading import FeatureReader, computing_in
from drafthead.train.learning.ranks import chain_lengths
from drafthead.train.optimizers import (
    OptimizerConfig,
    build_optimizers,
    lr_share,
    set_learning_rates,
)
from drafthead.train.settings import TrainConfig


@dataclass(frozen=True)
class TrainingTask:
    """The head to train, its target and its data."""

    target: Target
    target_name: str
    head: DraftHead
    sources: Sources
    train: PackedData
    validation: PackedData | None
    kept_features: KeptFeatures | None = None  # of `train`


@dataclass(frozen=True)
class StepRecord:
    """The figures of one optimiser step, over all processes."""

    step: int
    loss: float  # weighted over depths, per supervised token
    depth_loss: tuple[float, ...]  # nats a token
    depth_top1: tuple[float, ...]  # share of positions with a true token at that depth
    # First guesses, on average over all positions: decoding begins at fewer, and accepts less.
    right_in_a_row: float
    grad_norm: float | None  # before clipping; None where the launcher's engine hides it
    lr: tuple[float, ...]  # of each optimiser
    supervised_tokens: int  # since the start of the run
    seconds: float  # likewise
    supervised_tokens_per_s: float
    target_share: float  # of the step's time, spent on the target's features


class LossModule(nn.Module):
    """A head whose forward pass is its loss, so that wrappers such as DDP see all of it.

    The target stays outside: as a submodule it would be wrapped, sharded and saved.
    """

    def __init__(self, head: DraftHead, target: Target, mixed_precision: str):
        super().__init__()
        self.head, self._target, self._mixed_precision = head, target, mixed_precision

    def forward(self, batch: HeadBatch) -> tuple[torch.Tensor, HeadLoss]:
        """The summed loss as a plain tensor [], where FSDP looks for it, and the whole loss."""
        device = self._target.device
        with TiledAttention(device), computing_in(self._mixed_precision, device):
            loss = self.head.loss(batch, self._target)
        return loss.total, loss


class StepRunner:
    """Runs this process's part of each optimiser step."""

    def __init__(
        self,
        accelerator: Accelerator,
        task: TrainingTask,
        config: TrainConfig,
        optimizer: OptimizerConfig,
    ):
        """Prepare model and optimisers for this number of processes."""
        self.accelerator, self.task, self.optimizer_config = accelerator, task, optimizer
        self.config = config = config.shared_among(accelerator.num_processes)
        self.accumulation = config.accumulation(accelerator.num_processes)
        accelerator.gradient_accumulation_steps = self.accumulation
        optimizers = build_optimizers(task.head.named_parameters(), optimizer)
        self.peaks = [o.param_groups[0]["lr"] for o in optimizers]
        self.model, *self.optimizers = accelerator.prepare(
            LossModule(task.head, task.target, config.mixed_precision), *optimizers
        )
        self.reader = FeatureReader(
            task.target,
            task.train,
            task.head.features_needed,
            config.mixed_precision,
            task.kept_features,
        )
        self.rates: list[float] = []  # of the last step
        self.grad_norm: float | None = None

    def run(self, step: int, share: float, rows: list[int]) -> tuple[torch.Tensor, float]:
        """Train on `rows` once; `share` of the duration is used when half of the step is done.

        Returns the `loss_sums` [3 + 3K] of this process and the seconds of the target.
        """
        factor = lr_share(self.optimizer_config, share)
        self.rates = set_learning_rates(self.optimizers, self.peaks, factor)
        num_supervised = self.task.train.supervised_in(rows)
        micros = range(self.accumulation)
        parts = [self._micro_batch(step, micro, rows, num_supervised) for micro in micros]
        losses, seconds = zip(*parts, strict=True)
        return torch.stack(losses).sum(dim=0), sum(seconds)

    def _micro_batch(
        self, step: int, micro: int, rows: list[int], num_supervised: int
    ) -> tuple[torch.Tensor, float]:
        """One micro-batch of this process; the last one of a step updates the head."""
        accelerator, size = self.accelerator, self.config.micro_batch_rows
        index = micro * accelerator.num_processes + accelerator.process_index
        began = self._now()
        own = range(len(rows))[index * size : (index + 1) * size]
        batch = self.reader.batch([rows[number] for number in own])
        target_seconds = self._now() - began
        # What is chosen for a row depends on the step alone; noise also on the micro-batch.
        batch = replace(batch, seeds=[self._seed_of(step, number) for number in own])
        torch.manual_seed(self._seed_of(step, index))
        # accelerate divides by the micro-batches and DDP by the processes; what is left is the mean
        # over the supervised tokens of the whole step.
        scale = self.accumulation * accelerator.num_processes / num_supervised
        with accelerator.accumulate(self.model):
            total, loss = self.model(batch)
            accelerator.backward(total * scale)
            self._update()
        return loss_sums(loss, num_supervised), target_seconds

    def _update(self) -> None:
        """Clip the gradients and step the optimisers; accelerate skips all but the last call."""
        norm = None
        if self.accelerator.sync_gradients:
            limit = self.optimizer_config.max_grad_norm
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # Read when all work has been given to the device: it waits for that once, not twice.
        self.grad_norm = None if norm is None else float(norm)

    @torch.no_grad()
    def target_fault(self, rows: list[int]) -> str | None:
        """The name of what is not finite in the target, by its part of `rows`; else None."""
        size, accelerator = self.config.micro_batch_rows, self.accelerator
        for micro in range(self.accumulation):
            index = micro * accelerator.num_processes + accelerator.process_index
            batch = self.reader.batch(rows[index * size : (index + 1) * size])
            features = [*batch.features.taps, batch.features.last]
            real = batch.segments > 0
            if not all(f is None or bool(f[real].isfinite().all()) for f in features):
                return "hidden states"
        for name, weight in self.task.target.model.named_parameters():
            if not bool(weight.isfinite().all()):
                return f"weights {name}"
        return None

    def _seed_of(self, step: int, number: int) -> int:
        """A different seed for each row, or micro-batch, of each step."""
        run_and_step = self.config.seed * 1_000_003 + step
        return (run_and_step * 65_537 + number) % 2**63

    def _now(self) -> float:
        """The time after the device has finished its work."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def loss_sums(loss: HeadLoss, num_supervised: int) -> torch.Tensor:
    """The sums over micro-batches and processes, [3 + 3K].

    Loss per supervised token of the step, anchors, right guesses in a row; and for each depth the
    loss, the positions and the right first guesses.
    """
    scalars = [
        loss.total.detach() / num_supervised,
        torch.tensor(loss.ranks.shape[0]),
        chain_lengths(loss.ranks).sum(),
    ]
    hits = (loss.ranks == 0).sum(dim=0)
    parts = [*(s.reshape(1) for s in scalars), loss.depth_losses, loss.depth_counts, hits]
    device = loss.total.device
    # Apple's GPUs know no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.cat([part.to(device, wide) for part in parts])
