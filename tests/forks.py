"""Work in a fork of this process, which needs no imports: for what is killed or gets signals."""

import os
import sys
from collections.abc import Callable
from typing import TextIO

import torch


def forked(work: Callable[[], object]) -> tuple[int, TextIO]:
    """A process that works, and what it prints; it ends with the status of its SystemExit."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, os.fdopen(read)
    status = 1
    try:
        sys.stdout = os.fdopen(write, "w", buffering=1)
        torch.set_num_threads(1)
        work()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        os._exit(status)


def status_of(child: int) -> int:
    """With what a process ends; negative for a signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
