"""The training loop: features from the frozen target, the head's own loss, exact resume.

The loss of a step is the mean over the supervised tokens of all its rows, however they are shared
among micro-batches and processes, so their number does not change what is learnt. (In the on-policy
stage each micro-batch replays decoding with a tree of its own.)
"""

import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from drafthead.heads.base import DraftHead, HeadBatch, HeadLoss
from drafthead.heads.checkpoint import save_head
from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.train.console import StepBar, StopRequest
from drafthead.train.duration import Duration, TrainConfig
from drafthead.train.evaluation import Evaluation, chain_lengths, evaluate
from drafthead.train.features import read_features
from drafthead.train.optimizers import (
    OptimizerConfig,
    build_optimizers,
    lr_share,
    set_learning_rates,
)
from drafthead.train.packing import PackedData, RowOrder
from drafthead.train.replay import replayed
from drafthead.train.run_folder import (
    EVALUATION_FILE,
    METRICS_FILE,
    Progress,
    RunFolder,
    cut_log,
    provenance,
    read_progress,
)

logger = logging.getLogger(__name__)

STEPS_BEFORE_ESTIMATE = 5


@dataclass(frozen=True)
class TrainingTask:
    """What is trained on what, for which target."""

    target: Target
    target_name: str
    head: DraftHead
    train: PackedData
    validation: PackedData | None


@dataclass(frozen=True)
class StepRecord:
    """What one optimiser step showed, over all processes."""

    step: int
    loss: float  # weighted over depths, per supervised token
    depth_loss: tuple[float, ...]  # nats a token
    depth_top1: tuple[float, ...]  # share of positions with a true token at that depth
    tau: float  # tokens a pass that a greedy chain would get, on training data
    grad_norm: float | None  # before clipping; None where the launcher's engine keeps it
    lr: tuple[float, ...]  # one for each optimiser
    supervised_tokens: int  # since the start of the run
    seconds: float  # likewise
    supervised_tokens_per_s: float
    target_share: float  # of the step's time, spent in the target
    backward_share: float  # of the step's time, spent in the head's backward pass


class LossModule(nn.Module):
    """A head whose forward pass is its loss, so that wrappers such as DDP see the whole of it.

    The target stays outside: as a submodule it would be wrapped, sharded and saved.
    """

    def __init__(self, head: DraftHead, target: Target):
        super().__init__()
        self.head = head
        self._target = target

    def forward(self, batch: HeadBatch) -> tuple[torch.Tensor, HeadLoss]:
        """The summed loss as a plain tensor, where FSDP looks for it, and all of the loss."""
        loss = self.head.loss(batch, self._target)
        return loss.total, loss


class Trainer:
    """One run of training a head; `fit` does all of it."""

    def __init__(
        self,
        accelerator: Accelerator,
        task: TrainingTask,
        config: TrainConfig,
        optimizer: OptimizerConfig,
        folder: RunFolder,
    ):
        """Prepare everything for this number of processes."""
        self.accelerator, self.task, self.config = accelerator, task, config
        self.optimizer_config, self.folder = optimizer, folder
        self.accumulation = config.accumulation(accelerator.num_processes)
        accelerator.gradient_accumulation_steps = self.accumulation
        optimizers = build_optimizers(task.head.named_parameters(), optimizer)
        self.peaks = [o.param_groups[0]["lr"] for o in optimizers]
        self.model, *self.optimizers = accelerator.prepare(
            LossModule(task.head, task.target), *optimizers
        )
        self.order = RowOrder(len(task.train.rows), config.batch_rows, config.seed)
        self.duration = Duration.of(config, len(task.train.rows))
        self.fingerprint = task.train.fingerprint()
        self.progress = Progress()
        self.step_seconds = 0.0
        self.on_policy = False  # in the second stage
        self.grad_norm: float | None = None

    def fit(self) -> bool:
        """Train to the end of the budget and write the head.

        Continues from the folder's state, if it holds one. False when a stop was asked for; the
        state is saved then.
        """
        self._begin()
        started, first_step = time.perf_counter() - self.progress.seconds, self.progress.step
        is_main = self.accelerator.is_main_process
        done = self.duration.done(self.progress)
        with (
            StopRequest() as stop,
            StepBar(self.duration.limit, self.duration.unit, done, is_main) as bar,
        ):
            while not self.duration.is_used(self.progress):
                before = self.progress
                record, stopping = self._step(started, stop)
                self._log(METRICS_FILE, asdict(record))
                done = self.duration.done(self.progress)
                bar.update(done, record.loss, record.tau, record.supervised_tokens_per_s)
                if record.step == first_step + STEPS_BEFORE_ESTIMATE:
                    self._estimate(before)
                self._evaluate_and_save(before, stopping)
                if stopping:
                    return False
        self._finish()
        return True

    def _begin(self) -> None:
        """Load the latest state, say what is ahead, and open the logs."""
        resumes = self.folder.status(self.config.overwrite) == "resumable"
        state = self.folder.latest_state() if resumes else None
        if state is not None:
            self.progress = read_progress(state, self.fingerprint)
            self.accelerator.load_state(str(state))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.begin(self.progress if state else None)
        purge = {"tensorboard": {"purge_step": self.progress.step + 1}}
        self.accelerator.init_trackers("train", init_kwargs=purge)
        self._announce(state)

    def _announce(self, state: Path | None) -> None:
        data = self.task.train
        parameters = sum(p.numel() for p in self.task.head.parameters() if p.requires_grad)
        unit = "steps" if self.duration.unit == "step" else "seconds of steps"
        logger.info(
            "budget: %d rows with %d supervised tokens, %.0f %s of %d rows, %.2fM parameters",
            len(data.rows),
            data.supervised_tokens,
            self.duration.limit,
            unit,
            self.config.batch_rows,
            parameters / 1e6,
        )
        if state is not None:
            logger.info("continuing from %s", state)

    def _estimate(self, before: Progress) -> None:
        left = self.duration.limit - self.duration.done(self.progress)
        seconds = left * self.step_seconds if self.duration.unit == "step" else left
        tokens = self.progress.supervised_tokens - before.supervised_tokens
        logger.info(
            "about %.1f minutes to go at %.2f s and %d supervised tokens a step",
            seconds / 60,
            self.step_seconds,
            tokens,
        )

    def _step(self, started: float, stop: StopRequest) -> tuple[StepRecord, bool]:
        """One optimiser step; also whether any process was asked to stop."""
        began = time.perf_counter()
        share = self.duration.share_at_next_step(self.progress, self.step_seconds)
        self._enter_stage(share)
        rates = set_learning_rates(
            self.optimizers, self.peaks, lr_share(self.optimizer_config, share)
        )
        rows = self.order.rows_of_step(self.progress.step)
        num_supervised = self.task.train.supervised_in(rows)
        sums, seconds_of = self._accumulate(rows, num_supervised)
        ended = time.perf_counter()
        clock = [*seconds_of, ended - began, ended - started]
        if not self.accelerator.is_main_process:
            clock = [0.0] * len(clock)  # the main process's clock is everybody's
        shared = torch.cat([sums, sums.new_tensor([*clock, float(stop.requested)])])
        values = self.accelerator.reduce(shared, reduction="sum").tolist()
        in_target, in_backward, self.step_seconds, seconds, stopping = values[-5:]
        self.progress = Progress(
            self.progress.step + 1, seconds, self.progress.supervised_tokens + num_supervised
        )
        speed = num_supervised / self.step_seconds
        shares = (in_target / self.step_seconds, in_backward / self.step_seconds)
        record = self._record(values[:-5], rates, speed, shares)
        if not math.isfinite(record.loss):
            raise UserError(
                f"the loss became {record.loss} in step {record.step}: lower optimizer.lr; "
                f"the last state in {self.folder.states} is from before"
            )
        return record, stopping > 0

    def _enter_stage(self, share: float) -> None:
        """Begin the on-policy stage when its share of the budget is all that is left."""
        config = self.config
        if config.on_policy and not self.on_policy and share >= 1 - config.on_policy_share:
            self.on_policy = True
            logger.info("from step %d on: on-policy, behind what the head misses",
                        self.progress.step + 1)  # fmt: skip

    def _replay(self, batch: HeadBatch) -> tuple[HeadBatch, float]:
        """The batch with the roots of decoding; how many supervised places each stands for."""
        self.model.eval()
        with torch.no_grad():
            _, loss = self.model(batch)
        self.model.train()
        found = replayed(batch, loss.ranks)
        assert found.roots is not None
        return found, loss.ranks.shape[0] / max(1, int(found.roots.sum()))

    def _accumulate(
        self, rows: list[int], num_supervised: int
    ) -> tuple[torch.Tensor, tuple[float, float]]:
        """Work through this process's micro-batches and step the optimisers.

        Gives the sums of `loss_sums`, and the seconds in the target and in backward passes.
        """
        accelerator, size = self.accelerator, self.config.micro_batch_rows
        # accelerate divides by the micro-batches and DDP by the processes; what is left is the mean
        # over the supervised tokens of the whole step.
        scale = self.accumulation * accelerator.num_processes / num_supervised
        sums, in_target, in_backward = [], 0.0, 0.0
        for micro in range(self.accumulation):
            index = micro * accelerator.num_processes + accelerator.process_index
            tokens = self.task.train.batch(rows[index * size : (index + 1) * size])
            began = self._now()
            spec = self.task.head.features_needed
            batch = read_features(self.task.target, tokens, spec, self.config.mixed_precision)
            in_target += self._now() - began
            weight = 1.0
            if self.on_policy:
                batch, weight = self._replay(batch)
            # Random choices of a head depend on the step alone, not on what ran before it.
            torch.manual_seed(self._seed_of(index))
            with accelerator.accumulate(self.model):
                total, loss = self.model(batch)
                began = self._now()
                accelerator.backward(total * (scale * weight))
                in_backward += self._now() - began
                if accelerator.sync_gradients:
                    self.grad_norm = self._clip()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            sums.append(loss_sums(loss, num_supervised, weight))
        return torch.stack(sums).sum(dim=0), (in_target, in_backward)

    def _clip(self) -> float | None:
        """Clip the gradients; gives their norm before that."""
        limit = self.optimizer_config.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def _seed_of(self, micro_batch: int) -> int:
        """A seed of its own for each micro-batch of each step."""
        run_and_step = self.config.seed * 1_000_003 + self.progress.step
        return (run_and_step * 65_537 + micro_batch) % 2**63

    def _now(self) -> float:
        """The time once the device has finished what it was given."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _record(
        self, sums: list[float], rates: list[float], speed: float, shares: tuple[float, float]
    ) -> StepRecord:
        depth = self.task.head.depth
        loss, anchors, chained = sums[:3]
        losses, counts, hits = (sums[3 + i * depth : 3 + (i + 1) * depth] for i in range(3))
        return StepRecord(
            step=self.progress.step,
            loss=loss,
            depth_loss=tuple(x / max(1, n) for x, n in zip(losses, counts, strict=True)),
            depth_top1=tuple(x / max(1, n) for x, n in zip(hits, counts, strict=True)),
            tau=1 + chained / max(1, anchors),
            grad_norm=self.grad_norm,
            lr=tuple(rates),
            supervised_tokens=self.progress.supervised_tokens,
            seconds=self.progress.seconds,
            supervised_tokens_per_s=speed,
            target_share=shares[0],
            backward_share=shares[1],
        )

    def _log(self, name: str, record: dict[str, Any]) -> None:
        """One line in the folder's log and one point in TensorBoard, by the main process."""
        if self.accelerator.is_main_process:
            self.folder.log(name, record)
        group = name.removesuffix(".jsonl")
        step = record["step"]
        values = {f"{group}/{key}": v for key, v in flat(record).items() if key != "step"}
        self.accelerator.log(values, step=step)

    def _evaluate_and_save(self, before: Progress, stopping: bool) -> None:
        """What is due after a step. Evaluation goes first: a state never lacks one behind it."""
        config, step = self.config, self.progress.step
        ended = self.duration.is_used(self.progress)
        if config.eval_every and step % config.eval_every == 0 and not (stopping or ended):
            self._write_head(self._evaluate())
        period = 60 * config.save_minutes
        timed = self.progress.seconds // period > before.seconds // period
        if stopping or ended or timed or (config.save_every and step % config.save_every == 0):
            self._save_state()

    def _save_state(self) -> None:
        """Write all that resuming needs under a temporary name, then rename it."""
        if self.accelerator.is_main_process:
            self.folder.discard_temporary()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(self.folder.temporary_state()))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.keep_state(self.progress, self.fingerprint)
        self.accelerator.wait_for_everyone()

    def _evaluate(self) -> Evaluation | None:
        """Measure the head on held-out conversations, if there are any, and log it."""
        task = self.task
        if task.validation is None:
            return None
        torch.manual_seed(self.config.seed)
        rows = self.config.micro_batch_rows
        result = evaluate(
            self.accelerator, self.model, task.head, task.target, task.validation, rows
        )
        if self.accelerator.is_main_process:  # a run killed at its end evaluates there again
            cut_log(self.folder.path / EVALUATION_FILE, self.progress.step - 1)
        self._log(EVALUATION_FILE, {"step": self.progress.step, **result.summary()})
        trees = ", ".join(f"{tau:.2f} at {n}" for n, tau in result.tau_tree.items())
        logger.info(
            "step %d, held out: tau %.2f as a chain, as trees %s nodes",
            self.progress.step,
            result.tau_chain,
            trees,
        )
        return result

    def _write_head(self, evaluation: Evaluation | None) -> None:
        """Write the head as it is now, gathered from all processes, into the output folder."""
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return
        trained = self.task.head
        head = type(trained)(trained.config)
        head.load_state_dict({name.removeprefix("head."): t for name, t in state.items()})
        head.path_counts = evaluation.path_counts if evaluation else None
        origin = {
            **provenance(self.folder.settings),
            **vars(self.progress),
            "evaluation": evaluation.summary() if evaluation else None,
        }
        target = self.task.target
        save_head(head, self.folder.path, target, self.task.target_name, origin, dtype=target.dtype)

    def _finish(self) -> None:
        self._write_head(self._evaluate())
        if self.accelerator.is_main_process:
            self.folder.finish()
        logger.info("the head is in %s", self.folder.path)


def loss_sums(loss: HeadLoss, num_supervised: int, weight: float = 1.0) -> torch.Tensor:
    """What is summed over micro-batches and processes, [3 + 3K]; `weight` is that of the loss.

    Loss per supervised token of the step, anchors, right guesses in a row; and for each depth the
    loss, the positions and the right first guesses.
    """
    scalars = [
        weight * loss.total.detach() / num_supervised,
        torch.tensor(loss.ranks.shape[0]),
        chain_lengths(loss.ranks).sum(),
    ]
    hits = (loss.ranks == 0).sum(dim=0)
    parts = [*(s.reshape(1) for s in scalars), loss.depth_losses, loss.depth_counts, hits]
    device = loss.total.device
    # Apple's GPUs know no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.cat([part.to(device, wide) for part in parts])


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a record, those in lists and mappings under `name/key`.

    {"tau": 2, "lr": (3, 4)} becomes {"tau": 2, "lr/0": 3, "lr/1": 4}.
    """
    numbers: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers.update({f"{name}/{key}": number for key, number in value.items()})
        elif isinstance(value, list | tuple):
            numbers.update({f"{name}/{index}": number for index, number in enumerate(value)})
        else:
            numbers[name] = value
    return numbers
