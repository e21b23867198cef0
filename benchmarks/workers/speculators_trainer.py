"""`speculators train` on a processor: its trainer as installed, told that the device is the CPU.

Version 0.9 puts the model on device 0, pins batches and waits for an accelerator at each step.
Nothing else differs; its options come as they are.
"""

import sys

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig


def device(check_available: bool = False) -> torch.device | None:
    """The processor, but for those who ask for an accelerator with memory of its own to free."""
    return None if check_available else torch.device("cpu")


trainer.get_local_rank = lambda: "cpu"
torch.accelerator.current_accelerator = device
torch.accelerator.is_available = lambda: False
torch.accelerator.synchronize = lambda: None
torch.Tensor.pin_memory = lambda batch: batch
main(TrainConfig.resolve(sys.argv[1:]))
