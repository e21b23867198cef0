"""A cheap hash of a target's weights: the same for a copy, another one after any fine-tuning."""

import hashlib

import torch

from drafthead.core.target.placement import whole_weight
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import LOSSY

SAMPLES = 64  # elements of each tensor


def weights_fingerprint(target: Target) -> str:
    """A hash of the name, the shape and `SAMPLES` evenly spaced elements of every tensor.

    Reading a 70B model whole would take minutes. What changes a model on purpose (fine-tuning, a
    merged adapter) changes nearly all elements of the tensors that it touches; a single changed
    element is not noticed. Elements are compared in bfloat16, so that a model has one hash
    whichever of its types it is loaded in, and wherever its layers are.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(target.model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            weight = whole_weight(target.model, name, tensor).detach()
            if type(weight) is not torch.Tensor:  # torchao's, of which no element can be read
                weight = weight.dequantize()
            digest.update(_sample(weight).cpu().numpy().tobytes())
    if target.precision in LOSSY:  # of the same weights another model
        digest.update(target.precision.encode())
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements [up to SAMPLES] from the first to the last, as numbers that NumPy knows."""
    flat = tensor.reshape(-1)
    count = min(SAMPLES, flat.numel())
    places = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    chosen = flat[places]
    return chosen.bfloat16().view(torch.int16) if chosen.is_floating_point() else chosen
