"""Writes what a run produces: its logs, the states to resume from, and the head."""

from typing import Any

from accelerate import Accelerator
from torch import nn

from drafthead.heads.checkpoint import save_head
from drafthead.train.evaluation import Evaluation
from drafthead.train.run_folder import Progress, RunFolder, provenance
from drafthead.train.step import TrainingTask


class RunWriter:
    """Every process calls these methods, the main one writes."""

    def __init__(
        self, accelerator: Accelerator, folder: RunFolder, task: TrainingTask, model: nn.Module
    ):
        """`model` is the prepared `LossModule` around the task's head."""
        self.accelerator, self.folder, self.task, self.model = accelerator, folder, task, model
        self.fingerprint = task.train.fingerprint()

    def log(self, name: str, record: dict[str, Any]) -> None:
        """One line in the folder's log `name`, and one point in TensorBoard."""
        if self.accelerator.is_main_process:
            self.folder.log(name, record)
        group = name.removesuffix(".jsonl")
        values = {f"{group}/{key}": v for key, v in flat(record).items() if key != "step"}
        self.accelerator.log(values, step=record["step"])

    def save_state(self, progress: Progress) -> None:
        """Write all that resuming needs under a temporary name, then rename it."""
        if self.accelerator.is_main_process:
            self.folder.discard_temporary()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(self.folder.temporary_state()))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.keep_state(progress, self.fingerprint)
        self.accelerator.wait_for_everyone()

    def write_head(self, progress: Progress, evaluation: Evaluation | None) -> None:
        """Write the head as it is now, gathered from all processes, into the output folder."""
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return
        trained, target = self.task.head, self.task.target
        head = type(trained)(trained.config)
        head.load_state_dict({name.removeprefix("head."): t for name, t in state.items()})
        head.path_counts = evaluation.path_counts if evaluation else None
        origin = {
            **provenance(self.folder.settings),
            **vars(progress),
            "evaluation": evaluation.summary() if evaluation else None,
        }
        save_head(head, self.folder.path, target, self.task.target_name, origin, dtype=target.dtype)


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
