"""Training losses as pure functions, one loss for each position; the caller averages.

The peaks in the docstrings count float32 tensors [A, V] alive at once, forward and backward, the
gradient of the logits included and the given logits not; a test measures them. `chunked` works
through many positions with few logits in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch.nn.functional import cross_entropy, log_softmax, smooth_l1_loss, softmax

LK_ETA = 3.0  # how fast lk_hybrid moves from the divergence to the overlap
CE_SHARE = 0.1  # of cross entropy in ce_tv, the rest is total variation
DPACE_FLOOR = 0.5  # D-PACE's share of confidence 1, so that no product vanishes


def hard_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[label] of A positions, [A]; logits [A, V], labels [A]. Peak 3."""
    return cross_entropy(logits.float(), labels, reduction="none")


def soft_cross_entropy(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """-sum_v target_probs[v] log draft_probs[v] of A positions, [A]; both logits [A, V].

    Its gradient equals that of the forward KL divergence from target to draft. Peak 3.
    """
    target_probs = softmax(target_logits.float(), dim=-1)
    return -(target_probs * log_softmax(logits.float(), dim=-1)).sum(-1)


def overlap(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """alpha = sum_v min(target_probs[v], draft_probs[v]) of A positions, [A]; both logits [A, V].

    The chance that exact sampling accepts a token drawn from the draft (Leviathan et al., 2023,
    arXiv 2211.17192). Peak 4.5.
    """
    target_probs = softmax(target_logits.float(), dim=-1)
    return torch.minimum(target_probs, softmax(logits.float(), dim=-1)).sum(-1)


def total_variation(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """(1/2) sum_v |target_probs[v] - draft_probs[v]| = 1 - alpha of A positions, [A]. Peak 4.5."""
    return 1 - overlap(logits, target_logits)


def lk_alpha(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """-log alpha of A positions, [A] (LK losses, arXiv 2602.23881). Peak 4.5.

    Its gradient is that of the total variation divided by alpha, so it does not vanish for a fresh
    head, which has almost no overlap.
    """
    alpha = overlap(logits, target_logits)
    return -alpha.clamp_min(torch.finfo(alpha.dtype).tiny).log()


def lk_hybrid(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """weight KL(target || draft) + (1 - weight) (1 - alpha) of A positions, [A]. Peak 5.5.

    weight = exp(-LK_ETA alpha) without gradient: divergence at first, overlap once there is some
    (LK losses, arXiv 2602.23881).
    """
    target_log_probs = log_softmax(target_logits.float(), dim=-1)
    log_probs = log_softmax(logits.float(), dim=-1)
    target_probs = target_log_probs.exp()
    divergence = (target_probs * (target_log_probs - log_probs)).sum(-1)
    alpha = torch.minimum(target_probs, log_probs.exp()).sum(-1)
    weight = torch.exp(-LK_ETA * alpha.detach())
    return weight * divergence + (1 - weight) * (1 - alpha)


def ce_and_tv(
    logits: torch.Tensor, target_logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """CE_SHARE x hard cross entropy + (1 - CE_SHARE) x total variation of A positions, [A].

    The mixture of DSpark (arXiv 2607.05147). Peak 5.5.
    """
    hard = hard_cross_entropy(logits, labels)
    return CE_SHARE * hard + (1 - CE_SHARE) * total_variation(logits, target_logits)


def feature_loss(features: torch.Tensor, target_features: torch.Tensor) -> torch.Tensor:
    """Smooth L1 distance of A positions, [A], averaged over their D entries; both [A, D].

    d^2 / 2 for |d| < 1, else |d| - 1/2, as EAGLE regresses features (arXiv 2401.15077).
    """
    distance = smooth_l1_loss(features.float(), target_features.float(), reduction="none")
    return distance.mean(-1)


@dataclass(frozen=True)
class TokenLoss:
    """A loss of each position, by the name that configurations use.

    `function` takes the draft's logits [A, V], the target's logits [A, V] for the same token, or
    None where it reads only labels, and the true tokens [A]; it returns the losses [A].
    """

    function: Callable[..., torch.Tensor]
    reads_target: bool = True


TOKEN_LOSSES = {
    "hard": TokenLoss(lambda draft, _, labels: hard_cross_entropy(draft, labels), False),
    "soft": TokenLoss(lambda draft, target, _: soft_cross_entropy(draft, target)),
    "tv": TokenLoss(lambda draft, target, _: total_variation(draft, target)),
    "lk_alpha": TokenLoss(lambda draft, target, _: lk_alpha(draft, target)),
    "lk_hybrid": TokenLoss(lambda draft, target, _: lk_hybrid(draft, target)),
    "ce_tv": TokenLoss(ce_and_tv),
}


def known_loss(name: str) -> str:
    """Return the name of a token loss; raises ValueError, with the choices, for another."""
    if name not in TOKEN_LOSSES:
        raise ValueError(f"must be one of {', '.join(TOKEN_LOSSES)}")
    return name


LossName = Annotated[str, AfterValidator(known_loss)]
# Every depth has a weight.
DepthDecay = Annotated[float, Field(gt=0, le=1)]


def depth_weights(decay: float, depth: int) -> list[float]:
    """Weight decay^(k - 1) of depth k for depths 1 to `depth`: (1, .5, .25) for .5 and 3."""
    return [decay**index for index in range(depth)]


@torch.no_grad()
def dpace_weights(confidence: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Weights [A, K] of the positions of A drafted blocks (D-PACE, arXiv 2605.18810).

    `confidence` [A, K] is the draft's probability of each true token, `valid` [A, K] whether there
    is one. With c = (1 - DPACE_FLOOR) confidence + DPACE_FLOOR, the weight of position j is
    sum_{m >= j} prod_{i <= m} c_i: the expected number of tokens that are lost if j is wrong.
    Confidences (1, 0) make c = (1, 1/2), products (1, 1/2) and weights (3/2, 1/2).
    """
    smoothed = (1 - DPACE_FLOOR) * confidence.float() + DPACE_FLOOR
    reached = (smoothed * valid).cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1)


@torch.no_grad()
def ranks_of(logits: torch.Tensor, labels: torch.Tensor, most: int) -> torch.Tensor:
    """Return how many tokens have a larger logit than the label, at most `most`, [A].

    Logits (1, 3, 2) rank the labels 0, 1, 2 as 2, 0, 1.
    """
    return (logits > logits.gather(-1, labels[:, None])).sum(-1).clamp_max(most)
