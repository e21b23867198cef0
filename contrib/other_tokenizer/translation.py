"""The target's tokens as a draft model with another tokenizer reads them, and those it writes.

Both go through text: what the target committed is decoded and encoded again. What the draft model
writes becomes text, and the text those tokens that the target's tokenizer would write after the
text before it (string-level exact match: Timor et al., 2025, arXiv 2502.05202, section 3). Whether
they are the target's own choice is for the verifier to say: a wrong guess here costs acceptance,
never correctness.
"""

import copy
from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile

from tokenizers.decoders import DecodeStream
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.infer.request.text_pieces import waiting_tokens

# Characters at the end of a text whose tokens may change when it goes on, and as many before them
# for the tokenizer to start with.
LOOKBACK = 48


def fast(tokenizer: PreTrainedTokenizerBase | None, whose: str) -> PreTrainedTokenizerBase:
    """The tokenizer. Raises UserError when there is none, or one that is implemented in Python."""
    if tokenizer is None:
        raise UserError(
            f"the {whose} has no tokenizer, which a draft model with another vocabulary needs"
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"the {whose}'s tokenizer is implemented in Python: a draft model with another "
            "tokenizer needs fast ones for both"
        )
    return tokenizer


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


def unknown_specials(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> set[int]:
    """Numbers of the special tokens of one tokenizer that another one does not have as such."""
    known = set(other.all_special_tokens)
    return {
        number
        for number, token in own.added_tokens_decoder.items()
        if token.special and token.content not in known
    }


class Translator:
    """Two tokenizers, and what the text of one means to the other."""

    def __init__(
        self, target: PreTrainedTokenizerBase | None, draft: PreTrainedTokenizerBase | None
    ):
        """Raises UserError for a missing tokenizer, or one that is implemented in Python."""
        self.target, self.draft = fast(target, "target"), fast(draft, "draft model")
        self.waits = waiting_tokens(self.target)
        # Special tokens that mean nothing to the draft model would be letters to it, and its own
        # would be letters to the target.
        self.silent = unknown_specials(self.target, self.draft)
        self.foreign = unknown_specials(self.draft, self.target)
        # What the draft's tokenizer puts before every text, and a token for no text at all.
        first, last = self.draft.bos_token_id, self.draft.eos_token_id
        self.opening: list[int] = [i for i in self.draft("").input_ids if i == first]
        ends = (first, last, 0)
        self.nothing: int = next(number for number in ends if number is not None)
        self.pieces = token_texts(self.target)  # the target's tokens by their texts
        self.longest = max(map(len, self.pieces), default=0)  # characters of a piece
        self.lead = lead_of(self.draft)
        self.text_of_lead = self._decode([])

    def encode(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """The draft's tokens of a text, and the characters at which each starts and ends."""
        found = self.draft.backend_tokenizer.encode(text, add_special_tokens=False)
        starts, ends = zip(*found.offsets, strict=True) if found.ids else ((), ())
        return list(found.ids), list(starts), list(ends)

    def continuation(self, row: "TranslatedRow", own: Sequence[int]) -> list[int]:
        """The target's tokens after those of a row, if the draft model's `own` tokens come next.

        None come after the first bytes of a character when the draft model has another one in mind.
        """
        tokens = self.tokens(row.text[-LOOKBACK:], self.text(own))
        begun = len(row.unfinished)
        return tokens[begun:] if tokens[:begun] == row.unfinished else []

    def text(self, own: Sequence[int]) -> str:
        """The text that tokens of the draft model add to the text before them.

        It ends before bytes that are no whole character, and before a special token that the target
        does not have.
        """
        known = list(takewhile(lambda token: token not in self.foreign, own))
        for count in range(len(known), 0, -1):
            whole = self._decode(known[:count])
            # All tokens of a run of bytes are decoded to U+FFFD when its end is missing.
            if whole.startswith(self.text_of_lead) and not whole.endswith("\ufffd"):
                return whole[len(self.text_of_lead) :].partition("\ufffd")[0]
        return ""

    def _decode(self, own: Sequence[int]) -> str:
        """The text of tokens of the draft model that are not the first of a text."""
        tokenizer = self.draft.backend_tokenizer
        return str(tokenizer.decode([*self.lead, *own], skip_special_tokens=False))

    def tokens(self, before: str, text: str) -> list[int]:
        """The target's tokens of a text, from the end of the text before it.

        After ``I wal`` the text ``king on`` cannot begin as the tokenizer would write ``I walking
        on``, where a single token ``walking`` has both ends. There the longest tokens are taken,
        ``king``, until a token of the whole begins: `` on``.
        """
        whole, found, done = self._tokens(before + text), list[int](), 0
        while True:
            begun = self._tokens(before + text[:done])
            if whole[: len(begun)] == begun:
                return found + whole[len(begun) :]
            ahead = text[done : done + self.longest]
            beginnings = (ahead[:count] for count in range(len(ahead), 0, -1))
            piece = next((each for each in beginnings if each in self.pieces), None)
            if piece is None:
                return found
            found.append(self.pieces[piece])
            done += len(piece)

    def _tokens(self, text: str) -> list[int]:
        found = self.target.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(found.ids)


class TranslatedRow:
    """A row's text, and the draft's tokens of it that the draft model has read."""

    def __init__(self, translator: Translator):
        self.translator = translator
        self.tokens: list[int] = []  # the target's
        self.text = ""  # of all but the unfinished ones
        self.unfinished: list[int] = []  # the last of them, which wait for the rest of a character
        self.read: list[int] = []  # the draft's tokens
        self.ends: list[int] = []  # characters of the text after each of them
        self._encoded_before = 0  # characters of the text
        self._restart()

    def _restart(self) -> None:
        """Decode from the beginning."""
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []
        tokens, self.tokens, self.text, self.unfinished = self.tokens, [], "", []
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
            self.unfinished.append(token)
            if token not in translator.waits:
                piece = self._stream.step(translator.target.backend_tokenizer, self._waiting)
                self._waiting = []
                if piece:
                    self.text += piece
                    self.unfinished = []

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens; what has been read beyond is read again."""
        if count < len(self.tokens):
            del self.tokens[count:]
            self._restart()
            self._encoded_before = min(self._encoded_before, len(self.text))

    def renew(self) -> tuple[int, list[int]]:
        """Return how many of the draft's tokens stay, and those to read after them: at least one.

        If ``walk`` and then ``ing`` were committed, and the draft has a token ``walking``, the
        token for ``walk`` does not stay. From here on the new ones count as read.
        """
        kept, ids, ends = self._encode()
        self._encoded_before = len(self.text)
        pairs = zip(ids, self.read[kept:], strict=False)
        stay = kept + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # In place: what a step costs must not grow with the text.
        self.read[kept:], self.ends[kept:] = ids, ends
        stay = min(stay, len(self.read) - 1)  # the last one is read again: its logits are wanted
        return stay, self.read[stay:]

    def _encode(self) -> tuple[int, list[int], list[int]]:
        """The number of the draft's tokens that stay, those of the text after them, and where these
        end; encodes only what may have changed.

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
                return kept, ids[first:], later
            back *= 2  # no token starts there: look further back
        ids, _, ends = self.translator.encode(self.text)
        opening = self.translator.opening
        if not opening and not ids:
            opening = [self.translator.nothing]
        return 0, opening + ids, [0] * len(opening) + ends
