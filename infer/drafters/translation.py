"""The target's tokens as a draft model with another tokenizer reads and writes them.

Reading goes through text: what the target committed is decoded and encoded again. Writing goes
token by token: a draft model proposes only tokens whose text is a token of the target too, with its
own probabilities among these. What it proposes is thus drawn from a known distribution over the
target's tokens, so every rule of acceptance stays exact (token-level intersection: Timor et al.,
2025, arXiv 2502.05202, algorithm 4).
"""

import copy
from bisect import bisect_right
from collections.abc import Sequence

import torch
from tokenizers.decoders import DecodeStream
from torch import nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.infer.request.text_pieces import waiting_tokens

# Characters at the end of a text whose tokens may change when it goes on, and as many before them
# for the tokenizer to start with.
LOOKBACK = 48


class SharedTokens(nn.Module):
    """The S tokens with the same text in both vocabularies, by their numbers in each."""

    draft_ids: torch.Tensor  # [S]
    target_ids: torch.Tensor  # [S]
    of_target: torch.Tensor  # [V] the draft's number of each of the target's tokens; 0 for others

    def __init__(
        self,
        target: PreTrainedTokenizerBase,
        draft: PreTrainedTokenizerBase,
        sizes: tuple[int, int],  # rows of the output heads, the target's and the draft's
    ):
        """Raises UserError when no token is shared."""
        super().__init__()
        ours, theirs = token_texts(target), token_texts(draft)
        pairs = sorted(
            (theirs[text], number)
            for text, number in ours.items()
            if text in theirs and number < sizes[0] and theirs[text] < sizes[1]
        )
        if not pairs:
            raise UserError(
                "the draft model's tokenizer shares no token with the target's: choose another "
                "draft model"
            )
        draft_ids, target_ids = torch.tensor(pairs).unbind(1)
        of_target = torch.zeros(sizes[0], dtype=torch.long)
        of_target[target_ids] = draft_ids
        for name, table in (
            ("draft_ids", draft_ids),
            ("target_ids", target_ids),
            ("of_target", of_target),
        ):
            self.register_buffer(name, table)


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The text that each token adds to a text before it, and its number.

    Special tokens and parts of characters are left out. Where two tokens have one text, as a byte
    and its letter in SentencePiece, the later one is what the tokenizer writes.
    """
    lead = tokenizer.encode("a", add_special_tokens=False)[-1:]
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


class Translator:
    """Two tokenizers, and what the text of one means to the other."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase):
        """Raises UserError for tokenizers implemented in Python."""
        for whose, tokenizer in (("target", target), ("draft model", draft)):
            if not tokenizer.is_fast:
                raise UserError(
                    f"the {whose}'s tokenizer is implemented in Python: a draft model with another "
                    "tokenizer needs fast ones for both"
                )
        self.target, self.draft = target, draft
        self.waits = waiting_tokens(target)
        known = set(draft.all_special_tokens)
        # Special tokens that mean nothing to the draft model would be letters to it.
        self.silent = {
            number
            for number, token in target.added_tokens_decoder.items()
            if token.special and token.content not in known
        }
        # What the draft's tokenizer puts before every text, and a token for no text at all.
        self.opening: list[int] = [i for i in draft("").input_ids if i == draft.bos_token_id]
        ends = (draft.bos_token_id, draft.eos_token_id, 0)
        self.nothing: int = next(number for number in ends if number is not None)

    def encode(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """The draft's tokens of a text, and the characters at which each starts and ends."""
        found = self.draft.backend_tokenizer.encode(text, add_special_tokens=False)
        starts, ends = zip(*found.offsets, strict=True) if found.ids else ((), ())
        return list(found.ids), list(starts), list(ends)


class TranslatedRow:
    """A row's text, and the draft's tokens of it that the draft model has read."""

    def __init__(self, translator: Translator):
        self.translator = translator
        self.tokens: list[int] = []  # the target's
        self.text = ""  # of all but those that wait for the rest of a character
        self.read: list[int] = []  # the draft's tokens
        self.ends: list[int] = []  # characters of the text after each of them
        self._encoded_before = 0  # characters of the text
        self._restart()

    def _restart(self) -> None:
        """Decode from the beginning."""
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []
        tokens, self.tokens, self.text = self.tokens, [], ""
        self.add(tokens)

    def __copy__(self) -> "TranslatedRow":
        """A row that goes on by itself."""
        twin = TranslatedRow(self.translator)
        twin.add(self.tokens)
        twin.read, twin.ends = copy.copy(self.read), copy.copy(self.ends)
        twin._encoded_before = self._encoded_before
        return twin

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens of the target."""
        translator = self.translator
        for token in tokens:
            self.tokens.append(token)
            if token in translator.silent:
                continue
            self._waiting.append(token)
            if token not in translator.waits:
                piece = self._stream.step(translator.target.backend_tokenizer, self._waiting)
                self.text += piece or ""
                self._waiting = []

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens; what has been read beyond is read again."""
        if count < len(self.tokens):
            del self.tokens[count:]
            self._restart()
            self._encoded_before = min(self._encoded_before, len(self.text))

    def renew(self) -> tuple[int, list[int]]:
        """How many of the draft's tokens stay, and those to read after them: at least one.

        If ``walk`` and then ``ing`` were committed, and the draft has a token ``walking``, the
        token for ``walk`` does not stay. From here on the new ones count as read.
        """
        ids, ends = self._encode()
        self._encoded_before = len(self.text)
        stay = 0
        while stay < min(len(ids), len(self.read)) and ids[stay] == self.read[stay]:
            stay += 1
        stay = min(stay, len(ids) - 1)  # the last one is read again: its logits are wanted
        self.read, self.ends = ids, ends
        return stay, ids[stay:]

    def _encode(self) -> tuple[list[int], list[int]]:
        """The draft's tokens of the text and where they end; encodes only what may have changed.

        Tokens that end long before the text does stay. Encoding starts earlier still, at the end of
        another of them, and what it gives before the first that may change is dropped.
        """
        back = LOOKBACK
        while (kept := bisect_right(self.ends, self._encoded_before - back)) > 0:
            lead = bisect_right(self.ends, self.ends[kept - 1] - LOOKBACK)
            start, border = (self.ends[n - 1] if n else 0 for n in (lead, kept))
            ids, starts, ends = self.translator.encode(self.text[start:])
            if border - start in starts:
                first = starts.index(border - start)
                later = [start + end for end in ends[first:]]
                return self.read[:kept] + ids[first:], self.ends[:kept] + later
            back *= 2  # no token starts there: look further back
        ids, _, ends = self.translator.encode(self.text)
        opening = self.translator.opening
        if not opening and not ids:
            opening = [self.translator.nothing]
        return opening + ids, [0] * len(opening) + ends
