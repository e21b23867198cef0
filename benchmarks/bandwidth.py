"""The speed limit that memory sets: the bytes that a pass must read, and this machine's bandwidth.

A pass over few tokens does little arithmetic with each weight, so it cannot be faster than its
weights can be read: seconds >= `weight_bytes` / `copy_bandwidth`.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from drafthead.backends.cpu.packed_target import PackedTarget
from drafthead.core.target.architecture import find_decoder
from drafthead.core.target.block_modules import BlockEmbedding
from drafthead.core.target.int8 import Int8Linear
from drafthead.core.target.target import Target
from drafthead.core.target.weight_state import weights_of
from drafthead.infer.timing.machine import free_memory

# The copied buffer must not fit into a cache: the largest hold some hundred megabytes.
BUFFER = 2**30  # bytes, but at most 1 / MOST_OF_MEMORY of the free memory
MOST_OF_MEMORY = 8
COPIES = 7  # that are timed


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds from the call until the device has finished what it started."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has finished when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def weight_bytes(target: Target, tokens: int) -> int:
    """Bytes of weights that a pass over `tokens` tokens reads, each weight once.

    Counts the parameters and buffers of the decoder and the output head as they are stored, or as
    bytes where our kernels read these. A table
    that is only looked up (positions, embeddings that the output head does not share) counts with
    one row per token. All experts of a mixture count, though a pass reads only those to which its
    tokens are sent. The key-value cache does not count.
    """
    decoder: nn.Module = find_decoder(target.model)
    output_head: nn.Module = target.model.get_output_embeddings()
    head = {id(weight) for _, weight in weights_of(output_head)}
    looked_up = {
        id(module.weight)
        for module in decoder.modules()
        if isinstance(module, nn.Embedding | BlockEmbedding) and id(module.weight) not in head
    }
    weights = {
        id(weight): weight for module in (decoder, output_head) for _, weight in weights_of(module)
    }
    modules = [*decoder.modules(), output_head]
    products = {id(module.weight) for module in modules if isinstance(module, Int8Linear)}
    in_bytes = products if isinstance(target, PackedTarget) else set()
    total = 0
    for key, weight in weights.items():
        share = min(1.0, tokens / weight.shape[0]) if key in looked_up else 1.0
        total += round(share * weight.numel() * (1 if key in in_bytes else weight.element_size()))
    return total
