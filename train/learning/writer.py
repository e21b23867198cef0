"""Writes what a run produces: its logs, the states to resume from, and the head."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from drafthead.train.learning.evaluation import Evaluation
from drafthead.train.learning.step import TrainingTask
from drafthead.train.run.folder import BestEvaluation, Progress, RunFolder, provenance
from drafthead.train.run.trainables import save_trained


class RunWriter:
    """Every process calls these methods, the main one writes."""

    def __init__(
        self, accelerator: Accelerator, folder: RunFolder, task: TrainingTask, model: nn.Module
    ):
        """`model` is a `LossModule` around the head to write."""
        self.accelerator, self.folder, self.task, self.model = accelerator, folder, task, model
        self.sources = task.sources

    def log(self, name: str, record: dict[str, Any]) -> None:
        """One line in the folder's log `name`, and one point in TensorBoard."""
        if self.accelerator.is_main_process:
            self.folder.log(name, record)
        group = name.removesuffix(".jsonl")
        values = {f"{group}/{key}": v for key, v in flat(record).items() if key != "step"}
        self.accelerator.log(values, step=record["step"])

    def state_to_resume(self) -> Path:
        """The newest whole state; UserError when there is none."""
        # One process reads the files, and all take the state that it chose.
        chosen = [self.folder.states.newest_whole()] if self.accelerator.is_main_process else [None]
        [state] = broadcast_object_list(chosen)
        assert state is not None
        return state

    def save_state(self, progress: Progress) -> None:
        """Write all that resuming needs under a temporary name, then rename it."""
        if self.accelerator.is_main_process:
            self.folder.states.discard_temporary()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(self.folder.states.temporary))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.states.keep(progress, self.sources)
        self.accelerator.wait_for_everyone()

    def best_evaluation(self) -> BestEvaluation | None:
        """The best evaluation that the folder's log has, for every process."""
        found = [self.folder.best_evaluation()] if self.accelerator.is_main_process else [None]
        [best] = broadcast_object_list(found)
        return best

    def write_head(self, progress: Progress, evaluation: Evaluation | None, folder: Path) -> None:
        """Write the head as it is now, gathered from all processes."""
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
            "target_weights": self.sources.target,
            "target_precision": target.precision,
            "evaluation": evaluation.summary() if evaluation else None,
        }
        save_trained(head, folder, target, self.task.target_name, origin)


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a record, those in lists and mappings under `name/key`.

    {"loss": 2, "lr": (3, 4)} becomes {"loss": 2, "lr/0": 3, "lr/1": 4}.
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
