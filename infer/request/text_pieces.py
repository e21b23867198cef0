"""From token ids back to text: whole answers, and piece by piece."""

from collections.abc import Collection, Iterator, Sequence

from tokenizers.decoders import DecodeStream
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError

CONTEXT = 16  # tokens of a prompt that are decoded again, before its answer


def texts_of(
    sequences: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    skip_special: bool = True,
    after: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """The text that each sequence of token ids adds to that of its prompt in `after`.

    Without prompts each is a text by itself, whose first space some tokenizers strip. Special
    tokens are left out unless they are wanted. Bytes that are no character become U+FFFD. Spaces
    stay as the tokens have them: text that is cleaned up afterwards could not be shown piece by
    piece.
    """
    contexts = [context_of(prompt, tokenizer, skip_special) for prompt in after or ()]
    contexts = contexts or [([], 0)] * len(sequences)
    lists = [[*ids, *tokens] for (ids, _), tokens in zip(contexts, sequences, strict=True)]
    texts = tokenizer.batch_decode(
        lists, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )
    return [text[start:] for text, (_, start) in zip(texts, contexts, strict=True)]


def context_of(
    prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase, skip_special: bool = True
) -> tuple[list[int], int]:
    """The last tokens of a prompt, and how many characters of text they are.

    They are so many that what follows them does not begin a text, if the prompt has any text. Half
    of a character at the end is not counted: an answer may complete it, unless a special token is
    between them.
    """
    for count in (CONTEXT, len(prompt)):
        ids = [*prompt[-count:]]
        if text := texts_of([ids], tokenizer, skip_special)[0]:
            special = {*tokenizer.all_special_ids}
            begin = max(
                (place for place, token in enumerate(ids, 1) if token in special), default=0
            )
            [last] = texts_of([ids[begin:]], tokenizer, skip_special)
            return ids, len(text) - len(last) + len(last.rstrip("\ufffd"))
    return ids, 0


def text_pieces(
    tokens: Iterator[Sequence[int]], tokenizer: PreTrainedTokenizerBase, after: Sequence[int] = ()
) -> Iterator[str]:
    """Text as soon as its tokens are there, one piece for each of the sequences that has some.

    The pieces joined are the text that `texts_of` returns. Raises UserError, when the first piece
    is asked for, for a tokenizer implemented in Python.
    """
    text = GrowingAnswer(tokenizer, after=after)
    for committed in tokens:
        if piece := "".join(map(text.add, committed)):
            yield piece
    if rest := text.rest():
        yield rest


class GrowingAnswer:
    """An answer's text, token by token: never half a character, special tokens where wanted."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_special: bool = True,
        after: Sequence[int] = (),
        shown: Collection[int] = (),
    ):
        """`after` is the prompt; `shown` are special tokens whose names are part of the text.

        Raises UserError for a tokenizer implemented in Python.
        """
        if not tokenizer.is_fast:
            raise UserError("streaming needs a fast tokenizer; this one is implemented in Python")
        self.tokenizer, self.skip_special, self.shown = tokenizer, skip_special, shown
        self._waits = waiting_tokens(tokenizer)
        self._begin(after)

    def _begin(self, after: Sequence[int]) -> None:
        """Show what follows these tokens."""
        self._tokens, self._start = context_of(after, self.tokenizer, self.skip_special)
        self._waiting = [*self._tokens]
        self._stream = DecodeStream(skip_special_tokens=self.skip_special)
        self._given = 0  # characters that the stream has returned, the context's included

    def add(self, token: int) -> str:
        """The text that is complete with this token and was not before; maybe none."""
        if token in self.shown:
            piece = self.rest() + str(self.tokenizer.decode([token]))
            self._begin([*self._tokens, token])
            return piece
        self._tokens.append(token)
        self._waiting.append(token)
        if token in self._waits:
            return ""
        # The stream returns None until the bytes of a character are complete.
        piece = self._stream.step(self.tokenizer.backend_tokenizer, self._waiting) or ""
        self._waiting = []
        seen, self._given = max(0, self._start - self._given), self._given + len(piece)
        return piece[seen:]

    def rest(self) -> str:
        """The rest at the end: a character that is incomplete then becomes U+FFFD."""
        [text] = texts_of([self._tokens], self.tokenizer, self.skip_special)
        return text[max(self._start, self._given) :]


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
