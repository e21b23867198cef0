"""The text of a draft model's own tokens, as tokens of a target with another tokenizer.

The draft model's tokens become text, and the text becomes those tokens that the target's tokenizer
would write after the text before it (string-level exact match: Timor et al., 2025, arXiv
2502.05202, section 3). Whether they are the target's own choice is for the verifier to say: a wrong
guess here costs acceptance, never correctness.
"""

from collections.abc import Sequence
from itertools import takewhile

from drafthead.contrib.other_tokenizer.shared_tokens import lead_of, token_texts
from drafthead.contrib.other_tokenizer.translation import LOOKBACK, TranslatedRow, Translator


class TextWriter:
    """The draft model's tokens as text, and text as the target's tokens."""

    def __init__(self, translator: Translator):
        self.translator = translator
        self.pieces = token_texts(translator.target)  # the target's tokens by their texts
        self.longest = max(map(len, self.pieces), default=0)  # characters of a piece
        self.lead = lead_of(translator.draft)
        self.text_of_lead = self._decode([])

    def continuation(self, row: TranslatedRow, own: Sequence[int]) -> list[int]:
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
        foreign = self.translator.foreign
        known = list(takewhile(lambda token: token not in foreign, own))
        for count in range(len(known), 0, -1):
            whole = self._decode(known[:count])
            # All tokens of a run of bytes are decoded to U+FFFD when its end is missing.
            if whole.startswith(self.text_of_lead) and not whole.endswith("\ufffd"):
                return whole[len(self.text_of_lead) :].partition("\ufffd")[0]
        return ""

    def _decode(self, own: Sequence[int]) -> str:
        """The text of tokens of the draft model that are not the first of a text."""
        tokenizer = self.translator.draft.backend_tokenizer
        return str(tokenizer.decode([*self.lead, *own], skip_special_tokens=False))

    def tokens(self, before: str, text: str) -> list[int]:
        """The target's tokens of a text, from the end of the text before it.

        After ``I wal`` the text ``king on`` cannot begin as the tokenizer would write ``I walking
        on``, where a single token ``walking`` has both ends. There the longest tokens are taken,
        ``king``, until a token of the whole begins: `` on``.
        """
        whole, found, done = self._encode(before + text), list[int](), 0
        while True:
            begun = self._encode(before + text[:done])
            if whole[: len(begun)] == begun:
                return found + whole[len(begun) :]
            piece = self._longest_piece(text[done : done + self.longest])
            if not piece:
                return found
            found.append(self.pieces[piece])
            done += len(piece)

    def _encode(self, text: str) -> list[int]:
        found = self.translator.target.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(found.ids)

    def _longest_piece(self, text: str) -> str:
        """The longest beginning of a text that is one token; empty if there is none."""
        beginnings = (text[:count] for count in range(len(text), 0, -1))
        return next((piece for piece in beginnings if piece in self.pieces), "")
