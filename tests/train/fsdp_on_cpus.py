"""`train_heads.py` under FSDP on CPUs, for tests: launched by `accelerate launch`, not imported.

accelerate 1.15 takes FSDP where its state says that processes have GPUs (`AcceleratorState`), and
for processes on CPUs it says `MULTI_CPU`. All that FSDP itself does, PyTorch also does on CPUs.
"""

import typer
from accelerate import DistributedType, PartialState

from drafthead.train.train_heads import main


def call_processes_gpus() -> None:
    """Say what accelerate wants to hear, before a run begins."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    call_processes_gpus()
    typer.run(main)
