"""Training losses as pure functions of one position each; averaging is left to the caller.

Logits of many positions over a large vocabulary do not fit in memory at once, so `in_chunks` works
through the positions and recomputes a chunk's logits in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**25  # float32 entries alive at once in a chunk: 128 MiB


def hard_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[label] of A positions, [A]; logits [A, V], labels [A]."""
    return cross_entropy(logits.float(), labels, reduction="none")


def soft_cross_entropy(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """-sum_v target_probs[v] log draft_probs[v] of A positions, [A]; both logits [A, V].

    Its gradient equals that of the forward KL divergence from target to draft.
    """
    target_probs = softmax(target_logits.float(), dim=-1)
    return -(target_probs * log_softmax(logits.float(), dim=-1)).sum(-1)


@dataclass(frozen=True)
class TokenLoss:
    """What teaches a head one position, by the name that configurations use.

    `function` takes the draft's logits [A, V], the target's logits [A, V] for the same token, or
    None where it reads only labels, and the true tokens [A]; it gives the losses [A].
    """

    function: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
    reads_target: bool


def _from_target(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> TokenLoss:
    def loss(
        draft: torch.Tensor, target: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        assert target is not None
        return function(draft, target)

    return TokenLoss(loss, reads_target=True)


TOKEN_LOSSES = {
    "hard": TokenLoss(lambda draft, target, labels: hard_cross_entropy(draft, labels), False),
    "soft": _from_target(soft_cross_entropy),
}


@torch.no_grad()
def ranks_of(logits: torch.Tensor, labels: torch.Tensor, most: int) -> torch.Tensor:
    """How many tokens have a larger logit than the label, at most `most`, [A].

    Logits (1, 3, 2) rank the labels 0, 1, 2 as 2, 0, 1.
    """
    return (logits > logits.gather(-1, labels[:, None])).sum(-1).clamp_max(most)


def in_chunks(
    function: Callable[..., tuple[torch.Tensor, ...]], vocab_size: int, *rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """function(*rows) for rows [A, ...] worked through in chunks of at most MAX_LOGITS logits.

    `function` gives tensors of one entry a row. With more than one chunk the forward pass of each
    is repeated in the backward pass, so the peak is one chunk's logits and their gradient instead
    of A x V of each.
    """
    size = max(1, MAX_LOGITS // vocab_size)
    if rows[0].shape[0] <= size:
        return function(*rows)
    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    parts = [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
