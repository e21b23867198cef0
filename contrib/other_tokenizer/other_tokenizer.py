"""A draft model with a tokenizer of its own.

It reads the text of what the target has committed. By text it writes in all of its own tokens, and
what it wrote is encoded with the target's tokenizer and proposed as a chain, see `translation`.
Where both vocabularies have tokens with the same text, it also drafts these, token by token, as any
draft model does, with its own probabilities among them: a known distribution over the target's
tokens, so that every rule stays exact (token-level intersection: Timor et al., 2025, arXiv
2502.05202, algorithm 4). The planner chooses between the two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from drafthead.contrib.other_tokenizer.translation import TranslatedRow, Translator, token_texts
from drafthead.core.coupling import Choice
from drafthead.core.drafting.drafter import Committed, DraftSession
from drafthead.core.host import to_host
from drafthead.core.sampling import Sampling
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import GuessTree, token_tree
from drafthead.core.trees.tree import Budget, TokenTree
from drafthead.heads.growing.static import chain_budgets
from drafthead.infer.drafters.draft_model import DraftModel, DraftModelSession
from drafthead.infer.drafters.level_drafter import grown_budgets
from drafthead.infer.drafters.model_drafter import MODEL_DRAFTERS, OTHER_TOKENIZER
from drafthead.infer.engine.prefill import padded


@dataclass(frozen=True)
class SharedTokens:
    """The S tokens with the same text in both vocabularies, by their numbers in each."""

    draft_ids: torch.Tensor  # [S]
    target_ids: torch.Tensor  # [S]
    of_target: torch.Tensor  # [V] the draft's number of each of the target's tokens; 0 for others

    @classmethod
    def of(
        cls,
        ours: Mapping[str, int],
        theirs: Mapping[str, int],
        sizes: tuple[int, int],  # rows of the output heads, the target's and the draft's
        device: torch.device,
    ) -> "SharedTokens":
        """The shared ones of the target's and the draft's `token_texts`; S may be 0."""
        pairs = sorted(
            (theirs[text], number)
            for text, number in ours.items()
            if text in theirs and number < sizes[0] and theirs[text] < sizes[1]
        )
        table = torch.tensor(pairs, dtype=torch.long, device=device).view(-1, 2)
        draft_ids, target_ids = table.unbind(1)
        of_target = torch.zeros(sizes[0], dtype=torch.long, device=device)
        of_target[target_ids] = draft_ids
        return cls(draft_ids, target_ids, of_target)

    def __len__(self) -> int:
        """The number S of shared tokens."""
        return len(self.draft_ids)


class OtherTokenizer(DraftModel):
    """Chains of up to `depth` of the target's tokens by text; trees of shared tokens.

    Above temperature 0 chains are shared tokens too, if there are any. What is written by text is
    never drawn, so that all rules accept just what the target itself draws.
    """

    def __init__(
        self,
        model: Target,
        target: Target,
        depth: int,
        translator: Translator,
        shared: SharedTokens | None = None,
    ):
        """Without `shared` tokens all is by text. Raises UserError when depth is below 1."""
        super().__init__(model, target, depth)
        self.translator = translator
        self.shared = shared
        chains = chain_budgets(depth)
        if self.shared is None:
            self.budgets = chains
            self.sampling_rule = "match"
        else:
            self.budgets = (*grown_budgets(depth), *chains)

    def check_tokenizers(self, target: Target, model: Target) -> None:
        """Any two will do for which there is a `Translator`; raises UserError for models with an
        encoder, and for a draft model with running states: it goes back in its own text.
        """
        for each in (target, model):
            each.refuse_encoder("a draft model with another tokenizer")
        if model.stateful_layers is not None:
            model.refuse_states("drafting with another tokenizer")

    def proposable(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [..., S] of shared tokens, of all [..., V]."""
        assert self.shared is not None
        return logits.index_select(-1, self.shared.draft_ids)

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's numbers of shared tokens at places [...]."""
        assert self.shared is not None
        return self.shared.target_ids[places]

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft model's numbers of the target's tokens [...]."""
        assert self.shared is not None
        return self.shared.of_target[tokens]

    def __repr__(self) -> str:
        shared = "" if self.shared is None else f" with {len(self.shared)} shared tokens"
        return f"{super().__repr__()} by text{shared}"

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T] of lengths [B], which it reads as text."""
        return OtherTokenizerSession(self, prompts, lengths)


class OtherTokenizerSession(DraftModelSession):
    """A draft model at work on its own tokens of each row's text.

    Its cache holds what was read at the last proposal. Before the next one a row goes back to where
    its tokens have changed.
    """

    row_state = ("cache", "host_lengths", "rows", "roots", "logits")
    drafter: OtherTokenizer

    def _begin(self, prompts: torch.Tensor, lengths: torch.Tensor) -> None:
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

    def cut(self, length: int) -> None:
        for row in self.rows:
            row.cut(length + 1)
        self.logits = None

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        # What is written as text follows no draws.
        is_written = budget.nodes == budget.depth + 1 and random is None
        if self.drafter.shared is not None and not is_written:
            return super().propose(budget, sampling, random)
        self._catch_up()
        passes = [own_tokens(row, budget.depth) for row in self.rows]
        written = self._write(max(passes))
        self.cache.discard()
        chains = [
            self._chain_of(row, tokens[:count], log_probs[:count], budget)
            for row, count, (tokens, log_probs) in zip(self.rows, passes, written, strict=True)
        ]
        roots = [row.tokens[-1] for row in self.rows]
        tree = token_tree(roots, chains, self.model.device)
        # Lookup beside it compares its guesses with these on the host, where they stay: a step
        # copies to its device once.
        scores = [torch.tensor([0.0, *chain.scores]) for chain in chains]
        return replace(tree, scores=pad_sequence(scores, batch_first=True))  # [B, N]

    def _write(self, count: int) -> list[tuple[list[int], list[float]]]:
        """Of each row the draft model's own most probable tokens after each other, and the
        logarithms of their probabilities.
        """
        assert self.logits is not None
        logits, tokens, log_probs = self.logits, list[torch.Tensor](), list[torch.Tensor]()
        for level in range(count):
            if level > 0:
                sees_all = torch.ones(1, 1, level, dtype=torch.bool, device=logits.device)
                logits = self._feed(tokens[-1][:, None], level, sees_all)[:, -1]
            best, ids = logits.float().max(-1)
            tokens.append(ids)
            log_probs.append(best - logits.float().logsumexp(-1))
        # One table, for which the host waits once. Tokens are whole numbers in float32 as well.
        table = torch.stack([*tokens, *log_probs], 1)  # [B, 2 count]
        return [([int(x) for x in row[:count]], row[count:]) for row in to_host(table)]

    def _chain_of(
        self,
        row: TranslatedRow,
        own: Sequence[int],
        log_probs: Sequence[float],
        budget: Budget,
    ) -> GuessTree:
        """The target's tokens of what was written, within a budget.

        Of 4 tokens that became 2, the first is as likely as the first 2 of the 4 were.
        """
        tokens = self.drafter.translator.continuation(row, own)
        reached = list(accumulate(log_probs))
        scores = [
            reached[math.ceil(place * len(own) / len(tokens)) - 1]
            for place in range(1, len(tokens) + 1)
        ]
        most = min(budget.depth, budget.nodes - 1)
        return GuessTree.chain(tokens[:most], scores[:most])

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
            self.logits = self._read(part.sized(self.model.memory))


def own_tokens(row: TranslatedRow, count: int) -> int:
    """Return how many tokens of the draft model have the text of `count` tokens of the target.

    In a row whose 30 tokens were 40 to the draft model, 3 are 4. It depends on this row alone: its
    answer must not depend on the rows beside it.
    """
    return max(1, math.ceil(count * len(row.read) / len(row.tokens)))


def other_tokenizer(model: Target, target: Target, depth: int) -> OtherTokenizer:
    """A drafter of up to `depth` levels for a draft model with another tokenizer.

    Raises UserError for a tokenizer that is missing or implemented in Python.
    """
    translator = Translator(target.tokenizer, model.tokenizer)
    sizes = target.vocab_size, model.vocab_size
    shared = SharedTokens.of(translator.pieces, token_texts(translator.draft), sizes, target.device)
    return OtherTokenizer(model, target, depth, translator, shared if len(shared) else None)


MODEL_DRAFTERS.register(OTHER_TOKENIZER, other_tokenizer, "drafters of models")
