"""A cheap hash of a target's weights: the same for a copy, another one after any fine-tuning."""

import hashlib

import torch

from drafthead.core.storage.mapped_files import let_go
from drafthead.core.target.block_modules import blocks_in
from drafthead.core.target.blocks import Blocks
from drafthead.core.target.placement import whole_weight
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import LOSSY

SAMPLES = 64  # elements of each tensor


def weights_fingerprint(target: Target) -> str:
    """A hash of the name, the shape and `SAMPLES` evenly spaced elements of every tensor.

    Reading a 70B model whole would take minutes. What changes a model on purpose (fine-tuning, a
    merged adapter) changes nearly all elements of the tensors that it touches; a single changed
    element is not noticed. Elements are compared in bfloat16, so that a model has one hash
    whichever of its types it is loaded in, in blocks as well, and wherever its layers are.
    """
    digest = hashlib.blake2b(digest_size=8)
    blocks = blocks_in(target.model)
    for name, tensor in sorted({**target.model.state_dict(), **blocks}.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if isinstance(tensor, Blocks):
            digest.update(_sample_of_blocks(tensor).numpy().tobytes())
        elif tensor.numel():
            weight = whole_weight(target.model, name, tensor).detach()
            if type(weight) is not torch.Tensor:  # torchao's, of which no element can be read
                weight = weight.dequantize()
            digest.update(_sample(weight).cpu().numpy().tobytes())
    if target.precision in LOSSY:  # of the same weights another model
        digest.update(target.precision.encode())
    return digest.hexdigest()


def _sample_of_blocks(blocks: Blocks) -> torch.Tensor:
    """The elements that `_sample` takes of the dequantised matrix."""
    rows, columns = blocks.shape
    places = _places(rows * columns)
    chosen = blocks.rows(places // columns)[torch.arange(len(places)), places % columns]
    let_go(blocks.raw)
    return chosen.bfloat16().view(torch.int16)


def _places(size: int) -> torch.Tensor:
    """Evenly spaced numbers [up to SAMPLES] from 0 to size - 1."""
    count = min(SAMPLES, size)
    return torch.arange(count) * (size - 1) // max(1, count - 1)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements [up to SAMPLES] from the first to the last, as numbers that NumPy knows."""
    flat = tensor.reshape(-1)
    chosen = flat[_places(flat.numel()).to(flat.device)]
    return chosen.bfloat16().view(torch.int16) if chosen.is_floating_point() else chosen
