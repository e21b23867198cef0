"""Training losses as pure functions; each sums over positions and leaves averaging to the caller.

Logits of many positions over a large vocabulary do not fit in memory at once, so `in_chunks` works
through the positions and recomputes a chunk's logits in the backward pass.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**25  # float32 entries alive at once in a chunk: 128 MiB


def hard_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over A positions of -log softmax(logits)[label]; logits [A, V], labels [A]."""
    return cross_entropy(logits.float(), labels, reduction="sum")


def soft_cross_entropy(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Sum over A positions of -sum_v target_probs[v] log draft_probs[v]; both [A, V].

    Its gradient equals that of the forward KL divergence from target to draft.
    """
    target_probs = softmax(target_logits.float(), dim=-1)
    return -(target_probs * log_softmax(logits.float(), dim=-1)).sum()


def in_chunks(
    function: Callable[..., torch.Tensor], vocab_size: int, *rows: torch.Tensor
) -> torch.Tensor:
    """Sum of function(*chunk) over chunks of the rows [A, ...], at most MAX_LOGITS logits each.

    With more than one chunk the forward pass of each is repeated in the backward pass, so the peak
    is one chunk's logits and their gradient instead of A x V of each.
    """
    size = max(1, MAX_LOGITS // vocab_size)
    if rows[0].shape[0] <= size:
        return function(*rows)
    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    return torch.stack(
        [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    ).sum()
