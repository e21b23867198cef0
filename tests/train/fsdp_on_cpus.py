"""`train_heads.py` under FSDP on CPUs, for tests: launched by `accelerate launch`, not imported.

accelerate 1.15 takes FSDP where its state says that processes have GPUs (`AcceleratorState`), and
for processes on CPUs it says `MULTI_CPU`. All that FSDP itself does, PyTorch also does on CPUs.
"""

import typer
from accelerate import DistributedType, PartialState

from drafthead.train.train_heads import main

if __name__ == "__main__":
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    typer.run(main)
