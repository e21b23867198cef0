"""Checkpoints of every format to be damaged, and limits on what reading them may take."""

import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from written import DFLASH, DSPARK, EAGLE3, TARGET, Written

from drafthead.core.target.target import Target
from drafthead.heads.formats import load_head
from drafthead.heads.formats.checkpoint import weight_files
from drafthead.heads.formats.drafthead import save_head

EXAMPLES = [
    Written("medusa", "medusa", "medusa"),
    Written("medusa v2", "medusa", "medusa", {"output": "shared"}),
    Written("vllm-medusa", "vllm-medusa", "medusa"),
    Written("hydra", "hydra", "hydra", {"num_heads": 2, "num_blocks": 3}),
    Written("eagle", "eagle", "eagle"),
    Written("mlp", "mlp", "mlp_speculator"),
    Written("mlp tied", "mlp", "mlp_speculator", {"tie_weights": True}),
    Written("eagle3-sglang", "eagle3-sglang", "eagle3", {**EAGLE3, "draft_vocab_size": 40}),
    Written("eagle3-vllm", "eagle3-vllm", "eagle3", {"draft_vocab_size": 40}),
    Written("speculators eagle3", "speculators", "eagle3", {"draft_vocab_size": 40}),
    Written("speculators dflash", "speculators", "parallel", DFLASH),
    Written("dflash", "dflash", "parallel", DFLASH),
    Written("dflash-transformers", "dflash-transformers", "parallel", DFLASH),
    Written("dspark", "dspark", "parallel", DSPARK),
]
OURS, OUR_BLOCK = "ours", "our parallel head"
NAMES = [*(example.name for example in EXAMPLES), OURS]
# Copies of embeddings in the target's memory.
ALLOWANCE = 4 * TARGET.vocab_size * TARGET.hidden_size * 4
# What reading takes apart from the file: see `heads.formats.files`.
APART = 32 * 2**20


def build_examples(root: Path) -> None:
    """One folder for each example, two heads of ours, and the target, which they share."""
    for example in EXAMPLES:
        _, target = example.build(root / example.name)
    target.model.save_pretrained(root / "target")
    target = target_of(root)
    for name, source in ((OURS, "eagle"), (OUR_BLOCK, "dspark")):
        head = load_head(root / source, target)
        head.path_counts = {(): 20, (0,): 9, (1,): 4, (0, 0): 3}
        save_head(head, root / name, target, "target", {"seed": 1}, None)


@cache
def target_of(root: Path) -> Target:
    """The target of all examples."""
    model = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32)
    return Target(model)


def weights_of(folder: Path) -> Path:
    return weight_files(folder)[0]


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights with something done to their tensors."""
    path = weights_of(folder)
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        change(tensors)
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, path)
    else:
        tensors = torch.load(path, weights_only=True)
        change(tensors)
        torch.save(tensors, path)


def reconfigured(
    folder: Path, change: Callable[[dict[str, Any]], None], name: str = "config.json"
) -> None:
    path = folder / name
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def truncated(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) - 1)])


# What is allowed


class Grown:
    """Bytes by which the process's memory grew at the most, of any kind; 0 where none tells."""

    PEAK = Path("/proc/self/clear_refs")  # to forget the earlier peak, on Linux

    def __enter__(self) -> "Grown":
        self.most = 0
        self.before = self.resident("VmRSS")
        if self.before:
            self.PEAK.write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        self.most = self.resident("VmHWM") - self.before

    def resident(self, name: str) -> int:
        if not self.PEAK.exists():
            return 0
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds of computing."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
