"""What a user may call a prompt, and how much of an answer a row takes."""

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.request.prompts import PadToken, encode, pad_token_of
from drafthead.infer.request.request import Request

PLAIN = byte_tokenizer()
PLAIN.chat_template = None


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
    assert encode([{"role": "user", "content": "hi"}], plain) == encode("hi", plain)


def padded(tokenizer, side: str, **options):
    """Two prompts of 2 and 5 tokens as transformers pads them."""
    return tokenizer(["hi", "hello"], padding=True, padding_side=side, **options)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["pt", "np", None])
def test_a_tokenizers_output_is_its_prompts_without_padding(tokenizer, side, form) -> None:
    unpadded = tokenizer(["hi", "hello"])["input_ids"]
    output = padded(tokenizer, side, return_tensors=form)
    assert encode(output, tokenizer) == unpadded
    assert encode(dict(output), None) == unpadded
    assert encode(output["input_ids"], None, output["attention_mask"]) == unpadded
    assert encode(tokenizer("hi", return_tensors=form), None) == unpadded[:1]
    assert encode([tokenizer("hi", return_tensors=form), "hello"], PLAIN) == unpadded


def test_token_ids_in_every_container(tokenizer) -> None:
    for ids in (
        torch.tensor([5, 6]), np.array([5, 6]), (5, 6), [np.int64(5), 6],
        list(torch.tensor([5, 6])), torch.tensor([[5, 6]]), [torch.tensor([[5, 6]])],
        [np.array([5, 6], dtype=np.uint16)],
    ):  # fmt: skip
        assert encode(ids, None) == [[5, 6]], ids
    assert encode(torch.tensor([[5, 6], [7, 8]]), None) == [[5, 6], [7, 8]]
    assert encode([[5, 6], [7]], None, [[0, 1], [1]]) == [[6], [7]]


def test_a_mask_may_cut_off_nothing_but_the_ends(tokenizer) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert encode(ids, None, [[False, True, True, False], [True] * 4]) == [[2, 3], [5, 6, 7, 8]]
    for mask, complaint in (
        ([[1, 0, 1, 1], [1] * 4], "row 0 of attention_mask has a hole"),
        ([[1] * 4, [1] * 3], "row 1 of attention_mask has 3 entries for 4 tokens"),
        (torch.ones(1, 4), "attention_mask has 1 rows for 2 prompts"),
        ([[1] * 4, [2] * 4], "row 1 of attention_mask must hold nothing but 0 and 1"),
        ([[1] * 4, [0] * 4], "prompt 1 is empty"),
        ("1111", r"attention_mask must have the form \[T\] or \[B, T\], got str"),
    ):
        with pytest.raises(UserError, match=complaint):
            encode(ids, None, mask)
    with pytest.raises(UserError, match="attention_mask is given twice"):
        encode(padded(tokenizer, "left"), None, [[1], [1]])
    with pytest.raises(UserError, match="token ids must be integers, but the prompt holds a str"):
        encode(["a"], tokenizer, [[1]])


def test_without_a_mask_padding_is_known_by_its_token() -> None:
    ids = torch.tensor([[0, 0, 5, 0, 6], [5, 6, 7, 8, 0]])
    assert encode(ids, None, pad=PadToken(0, in_texts=False)) == [[5, 0, 6], [5, 6, 7, 8]]
    assert encode({"input_ids": ids.tolist()}, None, pad=PadToken(0, False)) == [
        [5, 0, 6], [5, 6, 7, 8],
    ]  # fmt: skip
    assert encode(ids.tolist(), None, pad=PadToken(0, False)) == ids.tolist(), "lists are exact"
    assert encode(ids, None) == ids.tolist()


def test_a_pad_token_that_also_ends_texts_is_text_or_refused() -> None:
    pad = PadToken(0, in_texts=True)
    assert encode(torch.tensor([[0, 5, 0], [0, 6, 0]]), None, pad=pad) == [[0, 5, 0], [0, 6, 0]]
    assert encode(torch.tensor([0, 0, 5]), None, pad=pad) == [[0, 0, 5]]
    for rows in ([[0, 0, 5], [0, 5, 6]], [[5, 0], [5, 6]]):
        with pytest.raises(UserError, match="token 0 .* padding or text.*pass attention_mask"):
            encode(torch.tensor(rows), None, pad=pad)


def test_the_pad_token_of_a_target(make_target, tokenizer) -> None:
    target = make_target()
    assert pad_token_of(target) == PadToken(0, in_texts=False)
    target.model.generation_config.eos_token_id = [3, 0]
    assert pad_token_of(target) == PadToken(0, in_texts=True)
    target.model.generation_config.pad_token_id = None
    assert pad_token_of(target) is None
    assert pad_token_of(Target(target.model, tokenizer)) == PadToken(0, in_texts=True)
    ends = byte_tokenizer()
    ends.pad_token = ends.eos_token
    assert pad_token_of(Target(target.model, ends)) == PadToken(1, in_texts=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_get_the_answers_of_the_prompts_alone(make_target, side) -> None:
    decoder = Decoder(Target(make_target(vocab=260).model, PLAIN))
    alone = [decoder.generate(text, max_new_tokens=9).sequences[0] for text in ("hi", "hello")]
    output = padded(PLAIN, side, return_tensors="pt")
    ids, mask = output["input_ids"], output["attention_mask"]
    assert decoder.generate(output, max_new_tokens=9).sequences == alone
    assert decoder.generate(ids, max_new_tokens=9, attention_mask=mask).sequences == alone
    assert decoder.generate(ids, max_new_tokens=9).sequences == alone
    pieces = decoder.stream(PLAIN("hi", return_tensors="pt"), max_new_tokens=9)
    assert "".join(pieces) == decoder.generate("hi", max_new_tokens=9).texts[0]


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        (None, "the prompt has the type NoneType: a prompt is a string, a list of chat"),
        (3.5, "the prompt has the type float"),
        (b"hi", "the prompt has the type bytes"),
        ({"hi", "there"}, "the prompt has the type set"),
        ({"ids": [1]}, r"the prompt has the type dict with the keys \['ids'\]: .* with input_ids"),
        ([{"content": "hi"}], r"prompt 0 has the type dict with the keys \['content'\]"),
        ({"input_ids": [1], "pixel_values": 2}, "the prompt holds pixel_values"),
        ({"input_ids": None}, "token ids must have the form .*, got NoneType"),
        ({"input_ids": [[1], 2]}, "token ids must have the form"),
        ([1, "hi"], "token ids must be integers, but the prompt holds a str"),
        (["hi", [1, "hi"]], "token ids must be integers, but prompt 1 holds a str"),
        (["hi", 1], "prompt 1 has the type int"),
        (["hi", None], "prompt 1 has the type NoneType"),
        ([1.0, 2.0], "prompt 0 has the type float"),
        ([True, False], "prompt 0 has the type bool"),
        ([["hi"]], "prompt 0 has the type list of str"),
        (
            [{"role": "user", "content": "hi"}, "hi"],
            "messages are mappings .*, but one has the type str",
        ),
        (torch.tensor(3), r"the prompt has the type Tensor of shape \[\]"),
        (torch.zeros(1, 2, 3), r"the prompt has the type Tensor of shape \[1, 2, 3\]"),
        (torch.ones(2, 3), "token ids must be integers, but the prompt holds a float"),
        (np.array([True]), "token ids must be integers, but the prompt holds a bool"),
        ([torch.ones(2, 3).long()], "prompt 0 of a list is itself a batch of 2"),
        (torch.zeros(2, 0).long(), "prompt 0 is empty"),
        ([[1], torch.zeros(0).long()], "prompt 1 is empty"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name_and_type(prompts, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        encode(prompts, PLAIN)


@pytest.mark.parametrize(
    "prompt", [[{"role": "user"}], [{"role": "user", "content": None}]], ids=["no text", "None"]
)
def test_messages_that_a_template_cannot_write_are_refused(tokenizer, prompt) -> None:
    with pytest.raises(UserError, match=r"chat template cannot write .* roles \['user'\]: "):
        encode(prompt, tokenizer)


def batch_of(limits: list[int], end_ids: frozenset[int] = frozenset()) -> BatchRun:
    """A batch of rows with these limits."""
    rows = len(limits)
    request = Request(prompts=[[3]] * rows, limits=limits, seeds=[0] * rows, end_ids=end_ids)
    return BatchRun(request, torch.device("cpu"))


def test_answers_are_cut_at_their_end_and_their_limit() -> None:
    batch = batch_of([5, 2, 9], end_ids=frozenset([7]))
    assert batch.take_step([[1, 7, 2], [1, 2, 3], [4]]) == {0: [1, 7], 1: [1, 2], 2: [4]}
    assert [row.finish_reason for row in batch.rows] == ["end_token", "length", None]
    assert [row.accept_lengths for row in batch.rows] == [[3], [3], [1]]
    assert batch.drop_idle() == [2]
    assert batch.take_step([[5, 6]]) == {2: [5, 6]}
    assert batch.drop_idle() is None


def test_idle_rows_wait_until_dropping_them_pays() -> None:
    batch = batch_of([1, 9, 9, 9, 9])
    batch.take([[1]] * 5)
    assert batch.drop_idle() is None, "one of five rows is idle"
    assert batch.take_step([[2]] * 5).keys() == {1, 2, 3, 4}
    assert batch.rows[0].tokens == [1] and batch.rows[0].accept_lengths == []
