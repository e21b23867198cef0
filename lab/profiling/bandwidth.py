"""The speed limit that memory sets: the bytes that a pass must read, and this machine's bandwidth.

A pass over few tokens does little arithmetic with each weight, so it cannot be faster than its
weights can be read: seconds >= `weight_bytes` / `copy_bandwidth`.
"""

from dataclasses import dataclass
from statistics import median

import psutil
import torch
from torch import nn

from drafthead.backends.compiled_target import CompiledTarget
from drafthead.core.target.architecture import find_decoder
from drafthead.core.target.seven_bits import can_be_rounded
from drafthead.core.target.target import Target
from drafthead.lab.profiling.pass_times import seconds_of

# The copied buffer must not fit into a cache: the largest hold some hundred megabytes.
BUFFER = 2**30  # bytes, but at most 1 / MOST_OF_MEMORY of the free memory
MOST_OF_MEMORY = 8
COPIES = 7  # that are timed
# How configurations of mixture-of-experts models name their number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying a buffer that is much larger than the last-level cache.

    The median of several copies, with as many threads as torch uses. Counted as in STREAM's copy
    (McCalpin, 1995): bytes read plus bytes written, so a buffer of n bytes counts 2 n. On a GPU it
    is a copy within device memory.
    """
    size = min(BUFFER, free_memory(device) // MOST_OF_MEMORY)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    destination.copy_(source)  # untimed: the first write also has to map the memory's pages
    taken = [seconds_of(lambda: destination.copy_(source), device) for _ in range(COPIES)]
    return 2 * source.numel() / median(taken)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def weight_bytes(target: Target, tokens: int) -> int:
    """Bytes of weights that a pass over `tokens` tokens reads, each weight once.

    Counts the parameters and buffers of the decoder and the output head as they are stored, or as
    bytes where compiled passes read these. A table
    that is only looked up (positions, embeddings that the output head does not share) counts with
    one row per token. All experts of a mixture count, though a pass reads only those to which its
    tokens are sent: there the result is an upper limit (`has_experts`). The key-value cache does
    not count.
    """
    decoder: nn.Module = find_decoder(target.model)
    head = {id(weight) for weight in target.output_head.parameters()}
    looked_up = {
        id(module.weight)
        for module in decoder.modules()
        if isinstance(module, nn.Embedding) and id(module.weight) not in head
    }
    weights = {
        id(weight): weight
        for module in (decoder, target.output_head)
        for weight in (*module.parameters(), *module.buffers())
    }
    modules = [*decoder.modules(), target.output_head]
    matrices = {id(module.weight) for module in modules if can_be_rounded(module)}
    in_bytes = matrices if isinstance(target, CompiledTarget) and target.reads_bytes else set()
    total = 0
    for key, weight in weights.items():
        share = min(1.0, tokens / weight.shape[0]) if key in looked_up else 1.0
        total += round(share * weight.numel() * (1 if key in in_bytes else weight.element_size()))
    return total


def has_experts(target: Target) -> bool:
    """Whether the target is a mixture of experts, of which a pass reads only some."""
    return any(getattr(target.config, name, None) for name in EXPERTS)


@dataclass(frozen=True)
class BandwidthBound:
    """How close plain decoding comes to the speed limit that memory sets."""

    weight_bytes: int  # read by a plain step
    copy_bytes_per_second: float
    plain_step_seconds: float
    all_experts_counted: bool  # for a mixture of experts: `weight_bytes` is an upper limit

    @property
    def seconds(self) -> float:
        """The time in which the weights can be read once: no step should be shorter."""
        return self.weight_bytes / self.copy_bytes_per_second

    @property
    def reached(self) -> float:
        """The bound over the time of a plain step; 1 would be as fast as memory allows."""
        return self.seconds / self.plain_step_seconds


def bandwidth_bound(target: Target, batch: int, plain_step_seconds: float) -> BandwidthBound:
    """Measure this machine's bandwidth and compare a plain step of `batch` rows with it."""
    return BandwidthBound(
        weight_bytes(target, batch),
        copy_bandwidth(target.device),
        plain_step_seconds,
        has_experts(target),
    )
