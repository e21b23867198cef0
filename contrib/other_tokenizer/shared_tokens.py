"""The tokens that two vocabularies share, which one model can propose to another token by token.

A draft model proposes only tokens whose text is a token of the target too, with its own
probabilities among these. What it proposes is thus drawn from a known distribution over the
target's tokens, so every rule of acceptance stays exact (token-level intersection: Timor et al.,
2025, arXiv 2502.05202, algorithm 4).
"""

from collections.abc import Mapping

import torch
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class SharedTokens(nn.Module):
    """The S tokens with the same text in both vocabularies, by their numbers in each."""

    draft_ids: torch.Tensor  # [S]
    target_ids: torch.Tensor  # [S]
    of_target: torch.Tensor  # [V] the draft's number of each of the target's tokens; 0 for others

    def __init__(
        self,
        ours: Mapping[str, int],
        theirs: Mapping[str, int],
        sizes: tuple[int, int],  # rows of the output heads, the target's and the draft's
    ):
        """Of the target's and the draft's `token_texts`; S may be 0."""
        super().__init__()
        pairs = sorted(
            (theirs[text], number)
            for text, number in ours.items()
            if text in theirs and number < sizes[0] and theirs[text] < sizes[1]
        )
        draft_ids, target_ids = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
        of_target = torch.zeros(sizes[0], dtype=torch.long)
        of_target[target_ids] = draft_ids
        for name, table in (
            ("draft_ids", draft_ids),
            ("target_ids", target_ids),
            ("of_target", of_target),
        ):
            self.register_buffer(name, table)

    def __len__(self) -> int:
        """The number S of shared tokens."""
        return len(self.draft_ids)


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The text that each token adds to a text before it, and its number.

    Special tokens and parts of characters are left out. Where two tokens have one text, as a byte
    and its letter in SentencePiece, the later one is what the tokenizer writes.
    """
    lead = lead_of(tokenizer)
    # In one call: one by one would take seconds for a large vocabulary.
    before, *pairs = tokenizer.backend_tokenizer.decode_batch(
        [lead, *([*lead, number] for number in range(len(tokenizer)))], skip_special_tokens=False
    )
    special = set(tokenizer.all_special_ids)
    texts: dict[str, int] = {}
    for number, text in enumerate(pairs):
        if number in special or not text.startswith(before) or "\ufffd" in text:
            continue
        if len(text) > len(before):
            texts[text[len(before) :]] = number
    return texts


def lead_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A token to decode others after, as the first one of a text may lose its space."""
    return list(tokenizer.encode("a", add_special_tokens=False)[-1:])
