"""A head that guesses among the frequent tokens only: which they are, and how it is taught.

The output head is most of a small head's cost, and most of a vocabulary is hardly ever said
(FR-Spec, Zhao et al., 2025, arXiv 2502.14856; EAGLE-3's `d2t` and `t2d`).
"""

from typing import NamedTuple

import torch


def most_frequent(token_counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of the `size` tokens with the largest counts [V], of equals the first.

    `d2t` [size] says how far guess i lies before its token, i + d2t[i]; `t2d` [V] marks the tokens
    that can be guessed. Of counts 5 0 9 9 the two most frequent tokens are 2 and 3: d2t is 2 2 and
    t2d marks the last two.
    """
    used = token_counts.sort(descending=True, stable=True).indices[:size].sort().values
    known = torch.zeros_like(token_counts, dtype=torch.bool).index_fill_(0, used, True)
    return used - torch.arange(size, device=used.device), known


class Lesson(NamedTuple):
    """What A positions teach, in the terms of a draft vocabulary."""

    labels: torch.Tensor  # [A] guesses that stand for the true tokens
    target_logits: torch.Tensor | None  # [A, Vd]
    taught: torch.Tensor  # [A] bool: false where nothing is to be learnt
    known: torch.Tensor  # [A] bool: whether the true token can be guessed


def translated(
    draft_ids: torch.Tensor,  # [Vd]
    vocab_size: int,
    labels: torch.Tensor,  # [A]
    target_logits: torch.Tensor | None,  # [A, V]
) -> Lesson:
    """True tokens and the target's logits on a draft vocabulary.

    The target's distribution is renormalised by dropping its other logits. As EAGLE-3's authors do,
    nothing is learnt where the token to be learnt lies outside: given logits the target's most
    probable one, which also stands in for a true token that cannot be guessed.
    """
    guess_of = labels.new_full((vocab_size,), -1)
    guess_of[draft_ids] = torch.arange(len(draft_ids), device=labels.device)
    guesses = guess_of[labels]
    known = taught = guesses >= 0
    if target_logits is not None:
        best = guess_of[target_logits.argmax(-1)]
        taught, guesses = best >= 0, guesses.where(known, best)
        target_logits = target_logits[:, draft_ids]
    return Lesson(guesses.clamp_min(0), target_logits, taught, known)
