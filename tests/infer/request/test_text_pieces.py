"""Text that comes piece by piece is the text that comes at the end."""

import random

import pytest
from tiny import byte_fallback_tokenizer, byte_tokenizer

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.request.text_pieces import GrowingAnswer, text_pieces, texts_of

TOKENIZER = byte_tokenizer()


def test_a_stream_says_what_generate_says(make_target) -> None:
    decoder = Decoder(Target(make_target(vocab=260).model, TOKENIZER))
    whole = decoder.generate("hello", max_new_tokens=30, temperature=1.0, seed=4)
    stream = decoder.stream("hello", max_new_tokens=30, temperature=1.0, seed=4)
    pieces = list(stream)
    assert len(pieces) > 3
    assert stream.stats.decoded_tokens == whole.stats.decoded_tokens
    assert "".join(pieces) == whole.texts[0]
    with pytest.raises(UserError, match="one prompt"):
        decoder.stream(["a", "b"])


@pytest.mark.parametrize("make", [byte_tokenizer, byte_fallback_tokenizer])
def test_pieces_joined_are_the_whole_text_of_any_tokens(make) -> None:
    """Random bytes: most of them are no characters, and many answers end within one."""
    tokenizer, chance = make(), random.Random(0)
    euro = tokenizer.convert_tokens_to_ids(
        ["<0xE2>", "<0x82>", "<0xAC>"] if make is byte_fallback_tokenizer else list("âĤ¬")
    )
    for _ in range(300):
        ids = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(12))]
        ids += euro[: chance.randrange(4)] + ids[:2] + euro[: chance.randrange(4)]
        cuts = sorted(chance.choices(range(len(ids) + 1), k=3))
        steps = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        (whole,) = texts_of([ids], tokenizer)
        assert "".join(text_pieces(iter(steps), tokenizer)) == whole, ids
        assert whole == tokenizer.decode(ids, skip_special_tokens=True)
        prompt = chance.choices(range(len(tokenizer)), k=chance.randrange(40))
        [rest] = texts_of([ids], tokenizer, after=[prompt])
        assert "".join(text_pieces(iter(steps), tokenizer, prompt)) == rest, (prompt, ids)


def test_what_follows_a_prompt_keeps_its_first_space() -> None:
    """Tokenizers of Llama 2's kind strip the first space of a text."""
    tokenizer = byte_fallback_tokenizer()
    a, b, end, special = tokenizer.convert_tokens_to_ids(["▁a", "▁b", "<0x0A>", "</s>"])
    long = [a] + [special] * 30
    prompts = [[], [special], [a], long, [a, end]]
    assert texts_of([[b, a]] * 5, tokenizer, after=prompts) == ["b a", "b a", *[" b a"] * 3]
    assert texts_of([[b]], tokenizer) == ["b"]
    halves = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>"])
    assert texts_of([halves[1:]], tokenizer, after=[[a, *halves[:1]]]) == ["é"]
    assert "".join(text_pieces(iter([halves[1:], [b]]), tokenizer, [a, *halves[:1]])) == "é b"


def test_what_a_message_ends_with_is_not_said_again() -> None:
    """An answer completes half of a character only where no special token is between them."""
    half, replaced, answer = (
        TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("€", "\ufffd", "a")
    )
    mark = TOKENIZER.eos_token_id
    prompts = [[*half[:2], mark], [*replaced, mark], [*replaced, mark, *half[:2]]]
    answers = [answer, answer, [*half[2:], *answer]]
    expected = ["a", "a", "€a"]
    assert texts_of(answers, TOKENIZER, after=prompts) == expected
    for prompt, tokens, text in zip(prompts, answers, expected, strict=True):
        assert "".join(text_pieces(iter([tokens]), TOKENIZER, prompt)) == text


def test_some_special_tokens_can_be_shown() -> None:
    tokenizer = byte_fallback_tokenizer()
    unknown, end, a = tokenizer.convert_tokens_to_ids(["<unk>", "</s>", "▁a"])
    text = GrowingAnswer(tokenizer, after=[a], shown=[end])
    pieces = [text.add(token) for token in (a, unknown, end, a, end)]
    assert "".join(pieces) + text.rest() == " a</s> a</s>"


def test_an_incomplete_last_character_is_shown() -> None:
    ids = TOKENIZER("a€", add_special_tokens=False)["input_ids"]
    assert list(text_pieces(iter([[token] for token in ids[:-1]]), TOKENIZER)) == ["a", "�"]
