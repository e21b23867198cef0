"""A low-rank correction of a block's logits by the tokens before each slot.

One pass over a block cannot know which token was drafted before a slot. A correction that depends
on this token alone recovers most of the loss (DSpark, arXiv 2607.05147), and needs no pass.
"""

from typing import Literal

import torch
from torch import nn

CorrectionKind = Literal["markov", "gated", "recurrent"]


class Correction(nn.Module):
    """The term output(code) that is added to a slot's logits, for a code of low rank.

    With e = embed(token before the slot), h the slot's hidden state and s the state of the block
    so far, which starts as 0, the code is

    - ``markov``: e;
    - ``gated``: sigmoid(gate(h, e)) x e;
    - ``recurrent``: tanh(o) where u, c, o = joint(s, e, h), and s becomes
      sigmoid(u) x s + (1 - sigmoid(u)) x tanh(c).

    These are DSpark's three; Domino (arXiv 2605.29707) is recurrent too.
    """

    def __init__(
        self, kind: CorrectionKind, rank: int, hidden_size: int, vocab_size: int, num_logits: int
    ):
        """`num_logits` is the number of tokens that can be drafted."""
        super().__init__()
        self.rank = rank
        self.embed = nn.Embedding(vocab_size, rank)
        self.output = nn.Linear(rank, num_logits, bias=False)
        nn.init.zeros_(self.output.weight)  # a fresh correction adds nothing
        self.gate = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint = nn.Linear(2 * rank + hidden_size, 3 * rank) if kind == "recurrent" else None

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state [..., R] before blocks whose first slots are hidden [..., D]."""
        return hidden.new_zeros(*hidden.shape[:-1], 0 if self.joint is None else self.rank)

    def advance(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes [..., rank] of slots with hidden [..., D] after tokens [...].

        Takes the state [..., R] before these tokens and also returns the state after them.
        """
        embedded = self.embed(before)
        if self.gate is not None:
            return torch.sigmoid(self.gate(torch.cat([hidden, embedded], -1))) * embedded, state
        if self.joint is not None:
            joint = self.joint(torch.cat([state, embedded, hidden], -1))
            update, change, code = joint.chunk(3, dim=-1)
            share = torch.sigmoid(update)
            return torch.tanh(code), share * state + (1 - share) * torch.tanh(change)
        return embedded, state

    def codes(self, before: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The codes [..., K, rank] of whole blocks [..., K, D] after known tokens [..., K]."""
        state = self.begin(hidden[..., 0, :])
        codes = []
        for slot in range(hidden.shape[-2]):
            code, state = self.advance(before[..., slot], hidden[..., slot, :], state)
            codes.append(code)
        return torch.stack(codes, dim=-2)

    @torch.no_grad()
    def begin_alike(self, embeddings: torch.Tensor) -> None:
        """Start the codes as the principal components of the target's embeddings [V, D].

        Tokens that are alike for the target then start alike, so that what is learnt after one
        token serves the others; a token that is not in the training data has nothing else.
        """
        centred = embeddings.float() - embeddings.float().mean(0)
        _, directions = torch.linalg.eigh(centred.T @ centred)  # in ascending order of variance
        codes = centred @ directions[:, -self.rank :]
        self.embed.weight.copy_(codes / codes.std().clamp_min(1e-6))
