"""The training loop: steps until the duration is used, evaluations, saved states, exact resume."""

import logging
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator

from drafthead.core.errors import UserError
from drafthead.train.data.packing import RowOrder
from drafthead.train.jobs.console import StepBar, StopRequest
from drafthead.train.learning.engines import HostMemory
from drafthead.train.learning.evaluation import Evaluation, evaluation_of, read_ranks, verdict
from drafthead.train.learning.step import StepRecord, StepRunner, TrainingTask
from drafthead.train.learning.writer import RunWriter
from drafthead.train.run.config import Duration
from drafthead.train.run.folder import (
    BEST_BY,
    BEST_FOLDER,
    EVALUATION_FILE,
    METRICS_FILE,
    Progress,
    RunFolder,
    cut_log,
    read_progress,
)
from drafthead.train.run.trainables import noun_of
from drafthead.train.settings import OptimizerConfig, TrainConfig

logger = logging.getLogger(__name__)

CURVE = (1 / 8, 1 / 4, 1 / 2)  # of the first epoch: what a head knows after so many of the answers


class Trainer:
    """One run of training a head; `fit` does all of it."""

    def __init__(
        self,
        accelerator: Accelerator,
        task: TrainingTask,
        config: TrainConfig,
        optimizer: OptimizerConfig,
        folder: RunFolder,
        memory: HostMemory,
    ):
        """Prepare everything for this number of processes."""
        self.accelerator, self.task, self.config, self.folder = accelerator, task, config, folder
        self.runner = StepRunner(accelerator, task, config, optimizer)
        self.writer = RunWriter(accelerator, folder, task, self.runner.model)
        self.order = RowOrder(len(task.train.rows), config.batch_rows, config.seed)
        self.duration = Duration.of(config, len(task.train.rows))
        self.progress = Progress()
        self.step_seconds = 0.0
        self.loss = math.nan  # of the last step
        self.memory = memory

    def fit(self) -> bool:
        """Train to the end of the duration and write the head.

        Continues from the folder's latest state, if there is one. False when a stop was asked for;
        the state is saved then.
        """
        self._begin()
        started = time.perf_counter() - self.progress.seconds
        is_main = self.accelerator.is_main_process
        done = self.duration.done(self.progress)
        with (
            StopRequest() as stop,
            StepBar(self.duration.limit, self.duration.unit, done, is_main) as bar,
        ):
            while not self.duration.is_used(self.progress):
                before = self.progress
                record, stopping = self._step(started, stop)
                self.memory.after_step(record.step)
                self.writer.log(METRICS_FILE, asdict(record))
                done = self.duration.done(self.progress)
                bar.show(done, record.loss, record.right_in_a_row, record.supervised_tokens_per_s)
                self._evaluate_and_save(before, stopping)
                if stopping:
                    return False
        self._finish()
        return True

    def _begin(self) -> None:
        """Load the latest state, open the logs, and report what is to be done."""
        resumes = self.folder.status(self.config.overwrite) == "resumable"
        state = self.writer.state_to_resume() if resumes else None
        if state is not None:
            self.progress = read_progress(state, self.writer.sources)
            self.accelerator.load_state(str(state))
            # The state holds how many micro-batches its processes had done: with another number of
            # processes the optimiser would step in the middle of a step.
            self.accelerator.step = 0
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
            "training: %d rows with %d supervised tokens, %.0f %s of %d rows, %.2fM parameters",
            len(data.rows),
            data.supervised_tokens,
            self.duration.limit,
            unit,
            self.config.batch_rows,
            parameters / 1e6,
        )
        if state is not None:
            logger.info("continuing from %s", state)

    def _step(self, started: float, stop: StopRequest) -> tuple[StepRecord, bool]:
        """One optimiser step; also whether any process was asked to stop."""
        began = time.perf_counter()
        share = self.duration.share_at_next_step(self.progress, self.step_seconds)
        rows = self.order.rows_of_step(self.progress.step)
        sums, in_target = self.runner.run(self.progress.step, share, rows)
        ended = time.perf_counter()
        clock = [in_target, ended - began, ended - started]
        *losses, target_seconds, self.step_seconds, seconds, stopping = self._summed(
            sums, clock, stop.requested
        )
        num_supervised = self.task.train.supervised_in(rows)
        self.progress = Progress(
            self.progress.step + 1, seconds, self.progress.supervised_tokens + num_supervised
        )
        record = self._record(losses, num_supervised, target_seconds)
        if not math.isfinite(record.loss):
            raise self._not_finite(record, rows)
        self.loss = record.loss
        return record, stopping > 0

    def _not_finite(self, record: StepRecord, rows: list[int]) -> UserError:
        """Say why the loss of a step is no number: the target, or the training."""
        fault = self.runner.target_fault(rows)
        faults = self.accelerator.reduce(
            torch.tensor(float(fault is not None), device=self.accelerator.device), reduction="sum"
        )
        saved = f"the last state in {self.folder.states.path} was saved before that"
        if faults > 0:
            return UserError(
                f"the loss became {record.loss} in step {record.step} because the target's own "
                f"{fault or 'hidden states'} are not finite: its files are damaged, or its numbers "
                "too narrow; look at its answers with `drafthead generate`, or set target.dtype to "
                f"float32 or bfloat16; {saved}"
            )
        return UserError(
            f"the loss became {record.loss} in step {record.step}: lower optimizer.lr; {saved}"
        )

    def _summed(self, losses: torch.Tensor, clock: list[float], stop: bool) -> list[float]:
        """`losses` [3 + 3K], the clock and the stop requests, summed over all processes."""
        if not self.accelerator.is_main_process:
            clock = [0.0] * len(clock)  # the main process's clock counts for all
        values = torch.cat([losses, losses.new_tensor([*clock, float(stop)])])
        return self.accelerator.reduce(values, reduction="sum").tolist()

    def _record(self, sums: list[float], num_supervised: int, target_seconds: float) -> StepRecord:
        """The record of the step just done; `sums` as `loss_sums` orders them."""
        depth = self.task.head.depth
        loss, anchors, chained = sums[:3]
        losses, counts, hits = (sums[3 + i * depth : 3 + (i + 1) * depth] for i in range(3))
        return StepRecord(
            step=self.progress.step,
            loss=loss,
            depth_loss=tuple(x / max(1, n) for x, n in zip(losses, counts, strict=True)),
            depth_top1=tuple(x / max(1, n) for x, n in zip(hits, counts, strict=True)),
            right_in_a_row=chained / max(1, anchors),
            grad_norm=self.runner.grad_norm,
            lr=tuple(self.runner.rates),
            supervised_tokens=self.progress.supervised_tokens,
            seconds=self.progress.seconds,
            supervised_tokens_per_s=num_supervised / self.step_seconds,
            target_share=target_seconds / self.step_seconds,
        )

    def _evaluate_and_save(self, before: Progress, stopping: bool) -> None:
        """Evaluate, save or show what is due after a step; a saved state has its own evaluation."""
        config, step = self.config, self.progress.step
        ended = self.duration.is_used(self.progress)
        due = config.eval_every is not None and step % config.eval_every == 0
        due = due or (config.curve and is_on_curve(self._epochs(before), self._epochs()))
        if due and self.task.validation is not None and not (stopping or ended):
            self._write_head(is_last=False)
        period = 60 * config.save_minutes
        timed = self.progress.seconds // period > before.seconds // period
        if stopping or ended or timed or (config.save_every and step % config.save_every == 0):
            self.writer.save_state(self.progress)

    def _epochs(self, progress: Progress | None = None) -> float:
        """Return how often all rows have been read, after the steps of `progress` or of the run."""
        step = (progress or self.progress).step
        return step * self.config.batch_rows / len(self.task.train.rows)

    def _evaluate(self) -> Evaluation | None:
        """Measure the head on held-out conversations, if there are any, and log it."""
        task = self.task
        if task.validation is None:
            return None
        torch.manual_seed(self.config.seed)
        rows = self.config.micro_batch_rows
        ranked = read_ranks(
            self.accelerator, self.runner.model, task.head, task.target, task.validation, rows
        )
        result = evaluation_of(ranked, task.validation)
        if self.accelerator.is_main_process:  # a run killed at its end evaluates there again
            cut_log(self.folder.path / EVALUATION_FILE, self.progress.step - 1)
        epochs = self._epochs()
        place = {
            "step": self.progress.step,
            "epochs": epochs,
            "answers": round(min(1.0, epochs) * len(task.train.sequences)),  # that were read
            "seconds": self.progress.seconds,
        }
        self.writer.log(EVALUATION_FILE, place | result.summary())
        trees = ", ".join(f"{tau:.2f} at {n}" for n, tau in result.tau_tree.items())
        logger.info(
            "step %d, held-out answers decoded again: tau %.2f as a chain, as trees %s nodes",
            self.progress.step,
            result.tau_chain,
            trees,
        )
        return result

    def _write_head(self, is_last: bool) -> None:
        """Evaluate the head and write it; one that is better than the last stays in `best/`."""
        before = self.writer.best_evaluation()
        evaluation = self._evaluate()
        self.writer.write_head(self.progress, evaluation, self.folder.path)
        if is_last:
            held_out, tokenizer = self.task.validation, self.task.target.tokenizer
            for sentence in verdict(self.loss, evaluation, held_out, tokenizer):
                logger.warning(sentence)
        if evaluation is None:
            return
        tau = evaluation.tau_tree[BEST_BY]
        if before is not None and before.step < self.progress.step and before.tau > tau:
            if is_last:
                logger.warning(
                    "held out, tau at %d nodes was %.2f after step %d and is %.2f now: the head of "
                    "that step is in %s",
                    BEST_BY,
                    before.tau,
                    before.step,
                    tau,
                    self.folder.path / BEST_FOLDER,
                )
        elif not is_last:
            self.writer.write_head(self.progress, evaluation, self.folder.path / BEST_FOLDER)
        elif self.accelerator.is_main_process:
            self.folder.drop_best()

    def _finish(self) -> None:
        self._write_head(is_last=True)
        if self.accelerator.is_main_process:
            self.folder.finish()
        logger.info("the %s is in %s", noun_of(self.task.head), self.folder.path)


def is_on_curve(before: float, now: float) -> bool:
    """Tell whether a step leads past a point of the learning curve; epochs before and after it."""
    return int(now) > int(before) or any(before < share <= now for share in CURVE)
