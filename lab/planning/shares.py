"""What each of several processes holds, under the engines of `configs/accelerate/`.

The frozen target is whole in each process. The sums follow the engines' descriptions and their
default sizes; nobody has measured them here.
"""

from collections import Counter
from typing import Literal

from drafthead.lab.planning.step_memory import CASTS, GRADIENTS, HEAD, OPTIMISER, StepMemory
from drafthead.train.learning.engines import refuse_average, refuse_muon
from drafthead.train.run.config import RunConfig

Engine = Literal["ddp", "fsdp2", "zero2", "zero3"]
BUCKETS, GATHERED = "buffers of the processes", "head: weights put together"
MASTER = "head: copies in float32"
BUCKET_NUMBERS = 500_000_000  # in DeepSpeed's buffer, where nothing else is set


def check_engine(config: RunConfig, engine: Engine) -> None:
    """Raise UserError for settings that an engine refuses."""
    if engine != "ddp":
        refuse_muon(config.optimizer)
    if engine in ("fsdp2", "zero3"):
        refuse_average(config.train)


def shared(
    memory: StepMemory, peak: Counter[str], engine: Engine, processes: int, precision: str
) -> Counter[str]:
    """The parts of one of `processes`, of those `peak` that a single one has.

    With several, all gradients count as there at the peak, whichever phase it is in.
    """
    parts, weights = Counter(peak), memory.held[HEAD]
    if engine == "ddp" and processes == 1:
        return parts
    gradients, state = memory.held[GRADIENTS], memory.held.get(OPTIMISER, 0)
    parts[GRADIENTS] = gradients
    if engine == "ddp":
        parts[BUCKETS] = gradients
        return parts
    parts[OPTIMISER] = state // processes
    if engine == "fsdp2":
        parts[HEAD], parts[GATHERED] = weights // processes, weights
        parts[GRADIENTS] += gradients // processes
        return parts
    smaller = 2 if precision == "bf16" else 1  # DeepSpeed then trains in bfloat16
    parts[MASTER] = gradients // processes
    parts[HEAD], parts[GRADIENTS] = weights // smaller, gradients // smaller
    parts[BUCKETS] = BUCKET_NUMBERS * 4 // smaller
    if smaller == 2:
        parts[CASTS] = 0
    if engine == "zero3":
        parts[GATHERED] = parts[HEAD]
        parts[HEAD] //= processes
        parts[GRADIENTS] //= processes
    return parts
