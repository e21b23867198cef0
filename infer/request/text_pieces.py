"""From token ids back to text: whole answers, and piece by piece."""

from collections.abc import Iterator, Sequence

from tokenizers.decoders import DecodeStream
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError


def texts_of(
    sequences: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    skip_special: bool = True,
) -> list[str]:
    """The text of each sequence of token ids, without special tokens unless these are wanted.

    Bytes that are no character become U+FFFD. Spaces stay as the tokens have them: text that is
    cleaned up afterwards could not be shown piece by piece.
    """
    lists = [list(tokens) for tokens in sequences]
    return tokenizer.batch_decode(
        lists, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )


def text_pieces(
    tokens: Iterator[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Text as soon as its tokens are there, one piece for each of the sequences that has some.

    The pieces joined are the text that `texts_of` returns. Raises UserError, when the first piece
    is asked for, for a tokenizer implemented in Python.
    """
    text = GrowingAnswer(tokenizer)
    for committed in tokens:
        if piece := "".join(map(text.add, committed)):
            yield piece
    if rest := text.rest():
        yield rest


class GrowingAnswer:
    """An answer's text, token by token: never half a character, special tokens where wanted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special: bool = True):
        """Raises UserError for a tokenizer implemented in Python."""
        if not tokenizer.is_fast:
            raise UserError("streaming needs a fast tokenizer; this one is implemented in Python")
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._waits = waiting_tokens(tokenizer)
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._tokens: list[int] = []
        self._waiting: list[int] = []
        self._shown = 0  # characters

    def add(self, token: int) -> str:
        """The text that is complete with this token and was not before; maybe none."""
        self._tokens.append(token)
        self._waiting.append(token)
        if token in self._waits:
            return ""
        # The stream returns None until the bytes of a character are complete.
        piece = self._stream.step(self.tokenizer.backend_tokenizer, self._waiting) or ""
        self._waiting = []
        self._shown += len(piece)
        return piece

    def rest(self) -> str:
        """What is left at the end: a character that is incomplete then becomes U+FFFD."""
        return texts_of([self._tokens], self.tokenizer, self.skip_special)[0][self._shown :]


def waiting_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens whose text may depend on the next token, and which are decoded together with it.

    SentencePiece models have a token for each byte, `<0xC3>`. A run of them is either text or, if
    any of its bytes is wrong, one U+FFFD for each. Special tokens do not end a run.
    """
    bytes_ = [tokenizer.backend_tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    added = tokenizer.added_tokens_decoder.items()
    return {number for number in bytes_ if number is not None} | {
        number for number, token in added if token.special
    }
