"""A draft model with a tokenizer of its own that shares tokens with the target's.

It drafts in two ways, between which the planner chooses: token by token, among the tokens that both
vocabularies have (`shared_tokens`), or by text, in all of its own (`by_text`).
"""

from dataclasses import replace

import torch

from drafthead.contrib.other_tokenizer.by_text import ByText, ByTextSession
from drafthead.contrib.other_tokenizer.shared_tokens import SharedTokens
from drafthead.contrib.other_tokenizer.text_writing import TextWriter
from drafthead.heads.coupling import Choice
from drafthead.heads.drafting.drafter import DraftSession
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget, TokenTree
from drafthead.infer.drafters.draft_model import DraftModel, DraftModelSession
from drafthead.infer.drafters.level_drafter import grown_budgets

TEXT = "text"  # the source of chains that are written as text


class OtherVocabulary(ByText):
    """Chains and trees of up to `depth` levels of shared tokens, and chains by text.

    Where children are drawn, and for trees of a fixed size, shared tokens are the only source.
    """

    sampling_rule = DraftModel.sampling_rule

    def __init__(
        self, model: Target, target: Target, depth: int, writer: TextWriter, shared: SharedTokens
    ):
        """`shared` has at least one token. Raises UserError when depth is below 1."""
        super().__init__(model, target, depth, writer)
        by_text = [replace(budget, source=TEXT) for budget in self.budgets]
        self.budgets = (*by_text, *grown_budgets(depth), *self.budgets)
        self.shared = shared.to(target.device)

    def proposable(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [..., S] of the shared tokens, of all [..., V]."""
        return logits.index_select(-1, self.shared.draft_ids)

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's numbers of shared tokens at places [...]."""
        return self.shared.target_ids[places]

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft model's numbers of the target's tokens [...]."""
        return self.shared.of_target[tokens]

    def __repr__(self) -> str:
        """That of the draft model, and how much it shares."""
        return f"{super().__repr__()} with {len(self.shared)} shared tokens"

    def stops(self, budget: Budget) -> tuple[Budget, ...]:
        """Those of a draft model, but for chains by text."""
        return (budget,) if budget.source == TEXT else DraftModel.stops(self, budget)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session whose model has read the text of the prompts [B, T] of lengths [B]."""
        return OtherVocabularySession(self, prompts, lengths)


class OtherVocabularySession(ByTextSession):
    """A draft model at work that can draft in both ways."""

    def drafted(self, budget: Budget) -> Budget:
        """That of a draft model, but for chains by text."""
        return budget if budget.source == TEXT else DraftModelSession.drafted(self, budget)

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """A chain by text, or a chain or tree of shared tokens."""
        if budget.source == TEXT:
            return super().propose(budget, sampling, random)
        return DraftModelSession.propose(self, budget, sampling, random)
