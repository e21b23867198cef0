"""The draft vocabulary: the frequent tokens that a head guesses among, and how it learns them.

The output head is most of a small head's cost, and most tokens of a vocabulary are rare
(FR-Spec, Zhao et al., 2025, arXiv 2502.14856; EAGLE-3's `d2t` and `t2d`).

A position whose true token cannot be guessed teaches nothing; elsewhere the target's distribution
is that of the guesses alone. Answers drawn from the target leave a position out as often as the
target's own probability of the other tokens says. (EAGLE-3's authors leave it out when the target's
most probable token cannot be guessed, which is the same for greedy answers, and needs all logits.)
"""

import torch
from torch import nn

from drafthead.core.target.target import Target
from drafthead.heads.objectives.batch import MAX_RANK
from drafthead.heads.objectives.losses import TokenLoss, ranks_of


def most_frequent(token_counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of the `size` tokens with the largest counts [V], of equals the first.

    Guess i is the token i + d2t[i], with `d2t` [size]; `t2d` [V] marks the tokens that can be
    guessed. Of counts 5 0 9 9 the two most frequent tokens are 2 and 3: d2t is 2 2 and
    t2d marks the last two.
    """
    used = token_counts.sort(descending=True, stable=True).indices[:size].sort().values
    return tables_of(used, len(token_counts))


def tables_of(ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables d2t [Vd] and t2d [V] of a draft vocabulary that consists of ascending ids [Vd]."""
    known = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return ids - torch.arange(len(ids), device=ids.device), known


class DraftVocabulary(nn.Module):
    """A mixin for heads that may guess among the most frequent tokens only.

    A base class and not a submodule, because checkpoints, EAGLE-3's and ours, hold the two tables
    as `d2t` and `t2d` at the top level: a submodule would add its own name as a prefix.
    """

    d2t: torch.Tensor | None  # [Vd], see `most_frequent`; None without a draft vocabulary
    t2d: torch.Tensor | None  # [V] bool

    def add_draft_vocabulary(self, vocab_size: int, draft_vocab_size: int) -> None:
        """Tables for `draft_vocab_size` of all tokens, which `prepare` chooses; none for 0."""
        self._vocab_size = vocab_size
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
        return guesses if self.d2t is None else guesses + self.d2t.take(guesses)

    @property
    def num_guesses(self) -> int:
        """Number of tokens that the head can guess."""
        return self._vocab_size if self.d2t is None else len(self.d2t)

    def guesses_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The guesses [A] that stand for tokens [A], and which of them [A] can be guessed."""
        if self.draft_ids is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        return translated(self.draft_ids, self._vocab_size, tokens)

    @torch.no_grad()
    def teacher_logits(self, teacher: torch.Tensor, target: Target) -> torch.Tensor:
        """The target's logits [..., Vd] for the guesses, from its final states [..., D]."""
        return target.project(teacher, self.draft_ids).float()

    def judged(
        self,
        logits: torch.Tensor,  # [..., Vd]
        target_logits: torch.Tensor | None,  # [..., Vd] of the target, if the rule reads them
        labels: torch.Tensor,  # [...] true tokens
        rule: TokenLoss,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses [...], 0 for tokens that cannot be guessed, and the ranks [...] of tokens."""
        guesses, known = self.guesses_of(labels.flatten())
        logits = logits.flatten(0, -2)
        teacher = None if target_logits is None else target_logits.flatten(0, -2)
        losses = rule.function(logits, teacher, guesses).where(known, 0)
        ranks = ranks_of(logits, guesses, MAX_RANK).where(known, MAX_RANK)
        return losses.view_as(labels), ranks.view_as(labels)


def translated(
    draft_ids: torch.Tensor, vocab_size: int, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of tokens [A] among `draft_ids` [Vd], and which tokens have one, [A].

    A token without a place gets place 0. Of the draft tokens 1 3, the tokens 3 0 1 are the guesses
    1 0 0, known (true, false, true).
    """
    place_of = tokens.new_full((vocab_size,), -1)
    place_of[draft_ids] = torch.arange(len(draft_ids), device=tokens.device)
    places = place_of[tokens]
    return places.clamp_min(0), places >= 0
