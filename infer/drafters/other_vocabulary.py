"""A draft model with a tokenizer of its own, so that any language model can draft for any other.

What the target commits is read as text, and what is proposed are tokens that both vocabularies
have; see `translation`.
"""

from collections.abc import Sequence
from typing import Self

import torch

from drafthead.heads.drafting.drafter import Committed, DraftSession
from drafthead.heads.errors import UserError
from drafthead.heads.host import to_host
from drafthead.heads.target.features import Features
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.draft_model import DraftModel, DraftModelSession
from drafthead.infer.drafters.translation import SharedTokens, TranslatedRow, Translator
from drafthead.infer.engine.prefill import padded


class OtherVocabulary(DraftModel):
    """Chains and trees of up to `depth` levels from a model with another tokenizer."""

    def __init__(self, model: Target, target: Target, depth: int):
        """Raises UserError without both tokenizers, or when they share no token."""
        super().__init__(model, target, depth)
        assert target.tokenizer is not None and model.tokenizer is not None
        self.translator = Translator(target.tokenizer, model.tokenizer)
        sizes = target.vocab_size, model.vocab_size
        self.shared = SharedTokens(target.tokenizer, model.tokenizer, sizes).to(target.device)

    def check_tokenizers(self, target: Target, model: Target) -> None:
        """Both are needed, and models without an encoder."""
        for each in (target, model):
            each.refuse_encoder("a draft model with another tokenizer")
        for whose, tokenizer in (("target", target.tokenizer), ("draft model", model.tokenizer)):
            if tokenizer is None:
                raise UserError(
                    f"the {whose} has no tokenizer, which a draft model with another vocabulary "
                    "needs"
                )

    def proposable(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [..., S] of the shared tokens, of all [..., V]."""
        return logits.index_select(-1, self.shared.draft_ids)

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's numbers of shared tokens at places [...]."""
        return self.shared.target_ids[places]

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft model's numbers of the target's tokens [...]."""
        return self.shared.of_target[tokens]

    def identity(self) -> str:
        """That of the draft model, and how much it shares."""
        return f"{super().identity()} with {len(self.shared.draft_ids)} shared tokens"

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session whose model has read the text of the prompts [B, T] of lengths [B]."""
        return OtherVocabularySession(self, prompts, lengths)


class OtherVocabularySession(DraftModelSession):
    """A draft model at work on its own tokens of each row's text.

    Its cache holds what was read at the last proposal. Before the next one a row goes back to where
    its tokens have changed.
    """

    row_state = ("cache", "host_lengths", "rows", "roots", "logits")
    drafter: OtherVocabulary

    def _begin(self, prompts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Read the prompts' texts."""
        translator = self.drafter.translator
        self.rows = [TranslatedRow(translator) for _ in range(len(lengths))]
        for row, tokens, length in zip(self.rows, to_host(prompts), to_host(lengths), strict=True):
            row.add(tokens[:length])
        texts, counts = padded([row.renew()[1] for row in self.rows], prompts.device)
        super()._begin(texts, counts)

    def commit(self, committed: Committed) -> None:
        """Add the committed tokens to the texts; of the prompt's commit, the root alone."""
        self._judge(committed)
        for row, tokens in zip(self.rows, committed.new_tokens, strict=True):
            row.add(tokens if self.roots is not None else tokens[-1:])
        self.roots, self.logits = committed.ends.roots, None

    def join_rows(self, other: Self, order: Sequence[int]) -> None:
        """Go on with rows of both, once both have read what is unread."""
        self._catch_up()
        other._catch_up()
        DraftSession.join_rows(self, other, order)

    def cut(self, length: int) -> None:
        """Keep the target's tokens at the first `length` positions and the one after them."""
        for row in self.rows:
            row.cut(length + 1)
        self.logits = None

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Go back to where each row's tokens have changed, and read what follows."""
        if self.logits is not None:
            return
        stay, new = zip(*(row.renew() for row in self.rows), strict=True)
        counts, width = [len(tokens) for tokens in new], max(map(len, new))
        table = [
            [first, count, *tokens, *[0] * (width - count)]
            for first, count, tokens in zip(stay, counts, new, strict=True)
        ]
        # One table, so that a step copies to its device once.
        there = torch.tensor(table).to(self.drafter.model.device)
        self.host_lengths = list(stay)
        self.cache.commit(None, there[:, 0], max(stay))
        read = Committed(there[:, 2:], Features(last=None), there[:, 1], host_tokens=list(new))
        for part in read.chunks():
            self.logits = self._read(part if self.model.memory is None else part.padded())
