"""The draft vocabulary: the frequent tokens that a head guesses among, and how it learns them.

The output head is most of a small head's cost, and most tokens of a vocabulary are rare
(FR-Spec, Zhao et al., 2025, arXiv 2502.14856; EAGLE-3's `d2t` and `t2d`).
"""

from typing import NamedTuple

import torch
from torch import nn


def most_frequent(token_counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of the `size` tokens with the largest counts [V], of equals the first.

    Guess i is the token i + d2t[i], with `d2t` [size]; `t2d` [V] marks the tokens that can be
    guessed. Of counts 5 0 9 9 the two most frequent tokens are 2 and 3: d2t is 2 2 and
    t2d marks the last two.
    """
    used = token_counts.sort(descending=True, stable=True).indices[:size].sort().values
    known = torch.zeros_like(token_counts, dtype=torch.bool).index_fill_(0, used, True)
    return used - torch.arange(size, device=used.device), known


class Lesson(NamedTuple):
    """Labels and target logits of A positions on a draft vocabulary."""

    labels: torch.Tensor  # [A] the guesses to learn, as places among the head's logits
    target_logits: torch.Tensor | None  # [A, Vd]
    taught: torch.Tensor  # [A] bool: false where nothing is to be learnt
    known: torch.Tensor  # [A] bool: whether the true token can be guessed


class DraftVocabulary(nn.Module):
    """A mixin for heads that may guess among the most frequent tokens only.

    A base class and not a submodule, because checkpoints, EAGLE-3's and ours, hold the two tables
    as `d2t` and `t2d` at the top level: a submodule would add its own name as a prefix.
    """

    d2t: torch.Tensor | None  # [Vd], see `most_frequent`; None without a draft vocabulary
    t2d: torch.Tensor | None  # [V] bool

    def add_draft_vocabulary(self, vocab_size: int, draft_vocab_size: int) -> None:
        """Tables for `draft_vocab_size` of all tokens, which `prepare` chooses; none for 0."""
        d2t = t2d = None
        if draft_vocab_size > 0:
            d2t, t2d = most_frequent(torch.zeros(vocab_size), draft_vocab_size)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    def prepare(self, token_counts: torch.Tensor) -> None:
        """Choose the tokens with the largest counts [V], of equals the first."""
        if self.d2t is not None and self.t2d is not None:
            d2t, t2d = most_frequent(token_counts, len(self.d2t))
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """The tokens [Vd] that the head can guess, in the order of its logits; None for all."""
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def tokens_of(self, guesses: torch.Tensor) -> torch.Tensor:
        """The token ids [...] of guesses [...], which are places among the head's logits."""
        return guesses if self.d2t is None else guesses + self.d2t[guesses]

    def lesson(self, labels: torch.Tensor, target_logits: torch.Tensor | None) -> Lesson:
        """What labels [A] and the target's logits [A, V] teach the head; see `translated`."""
        if self.draft_ids is None or self.t2d is None:
            everywhere = torch.ones_like(labels, dtype=torch.bool)
            return Lesson(labels, target_logits, taught=everywhere, known=everywhere)
        return translated(self.draft_ids, len(self.t2d), labels, target_logits)


def translated(
    draft_ids: torch.Tensor,  # [Vd]
    vocab_size: int,
    labels: torch.Tensor,  # [A]
    target_logits: torch.Tensor | None,  # [A, V]
) -> Lesson:
    """True tokens and the target's logits on a draft vocabulary.

    The target's distribution is renormalised by dropping its other logits. A position teaches
    nothing when the token to learn lies outside the draft vocabulary, as EAGLE-3's authors do it:
    the true token or, with target logits, the target's most probable one. The latter also replaces
    a true token that cannot be guessed. For tokens 0 to 3 and draft tokens 1 3, the labels 3 0
    without target logits give the labels 1 0, taught and known (true, false).
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
