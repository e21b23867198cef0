"""What a user may call a prompt, and text that comes piece by piece."""

import pytest
import torch
from tiny import byte_tokenizer

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.engine.batch_run import Batch
from drafthead.infer.request.prompts import encode, text_pieces


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte."""
    return byte_tokenizer()


def test_every_form_of_a_prompt(tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer("<|user|>hi<|end|><|assistant|>")["input_ids"]
    assert encode("hi", tokenizer) == [rendered]
    assert encode(chat, tokenizer) == [rendered]
    assert encode([5, 6], tokenizer) == [[5, 6]]
    assert encode(torch.tensor([5, 6]), tokenizer) == [[5, 6]]
    assert encode(["hi", chat, [5, 6], torch.tensor([7])], tokenizer) == [
        rendered, rendered, [5, 6], [7],
    ]  # fmt: skip


def test_text_without_a_chat_template_is_taken_as_it_is(tokenizer) -> None:
    plain = byte_tokenizer()
    plain.chat_template = None
    assert encode("hi", plain) == [plain("hi")["input_ids"]]
    with pytest.raises(UserError, match="no chat template"):
        encode([{"role": "user", "content": "hi"}], plain)


def test_pieces_never_cut_a_character(tokenizer) -> None:
    ids = tokenizer("a€b", add_special_tokens=False)["input_ids"]  # five bytes
    pieces = list(text_pieces(([token] for token in ids), tokenizer))
    assert pieces == ["a", "€", "b"]


def test_a_stream_says_what_generate_says(make_target, tokenizer) -> None:
    decoder = Decoder(Target(make_target(vocab=260).model, tokenizer))
    whole = decoder.generate("hello", max_new_tokens=30, temperature=1.0, seed=4)
    stream = decoder.stream("hello", max_new_tokens=30, temperature=1.0, seed=4)
    pieces = list(stream)
    assert len(pieces) > 3
    assert stream.stats.decoded_tokens == whole.stats.decoded_tokens
    # Both replace bytes that are no text, but not in equal number.
    assert "".join(pieces).replace("�", "") == whole.texts[0].replace("�", "")
    with pytest.raises(UserError, match="one prompt"):
        decoder.stream(["a", "b"])


def test_answers_are_cut_at_their_end_and_their_limit() -> None:
    batch = Batch(limits=[5, 2, 9], end_ids=frozenset([7]))
    assert batch.take_step([[1, 7, 2], [1, 2, 3], [4]]) == {0: [1, 7], 1: [1, 2], 2: [4]}
    assert [row.finished for row in batch.rows] == [True, False, False]
    assert [row.accept_lengths for row in batch.rows] == [[3], [3], [1]]
    assert batch.drop_idle() == [2]
    assert batch.take_step([[5, 6]]) == {2: [5, 6]}
    assert batch.drop_idle() is None


def test_idle_rows_wait_until_dropping_them_pays() -> None:
    batch = Batch(limits=[1, 9, 9, 9, 9], end_ids=frozenset())
    batch.take([[1]] * 5)
    assert batch.drop_idle() is None, "one of five rows is idle"
    assert batch.take_step([[2]] * 5).keys() == {1, 2, 3, 4}
    assert batch.rows[0].tokens == [1] and batch.rows[0].accept_lengths == []
