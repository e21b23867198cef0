"""Text while its tokens come: stops, drafted parts and calls of tools."""

from types import SimpleNamespace

import pytest
from llguidance.hf import from_tokenizer
from tiny import byte_fallback_tokenizer, byte_tokenizer
from tokenizers import AddedToken

from drafthead.serve.answer_text import CALL as BEGIN
from drafthead.serve.answer_text import END_OF_CALL as END
from drafthead.serve.answer_text import AnswerText, ToolCalls, held
from drafthead.serve.decode_loop import Piece
from drafthead.serve.protocol import ChatRequest
from drafthead.serve.responses import Choice


def shown(text: str, stops: list[str], sizes: list[int]) -> tuple[list[tuple[str, bool]], str]:
    """What is shown of a text whose tokens come in passes of some sizes, and why it ended."""
    tokenizer = byte_tokenizer()
    known = from_tokenizer(tokenizer)
    answer = AnswerText(tokenizer, lambda token: known.decode_bytes([token]), stops)
    tokens = tokenizer(text)["input_ids"]
    parts, reason = [], None
    for size in sizes:
        taken = 0
        for token in tokens[:size]:
            taken, reason = taken + 1, answer(token)
            if reason:
                break
        tokens = tokens[size:]
        drafted = [place < size - 1 for place in range(taken)]
        parts += answer.show(drafted, ended=reason is not None or not tokens)
        if reason:
            break
    return parts, reason or "length"


def said_of(answer: AnswerText, tokens: list[int]) -> tuple[str, int]:
    """What an answer says whose tokens come one by one, and how many it has taken at its end."""
    parts = []
    for count, token in enumerate(tokens, 1):
        ended = answer(token) is not None
        parts += answer.show([False], ended or count == len(tokens))
        if ended:
            break
    return "".join(part for part, _ in parts), count


@pytest.mark.parametrize("sizes", [[1] * 14, [14], [3, 4, 2, 5]])
@pytest.mark.parametrize(
    ("stops", "said", "reason"),
    [
        ([], "héllo world é", "length"),
        (["wor"], "héllo ", "stop_string"),
        (["é!", "o w", "wor"], "héll", "stop_string"),
        (["world ée"], "héllo world é", "length"),
    ],
)
def test_a_stop_string_ends_an_answer_however_its_tokens_come(sizes, stops, said, reason) -> None:
    text = "héllo world é"
    sizes = [*sizes, 100]
    parts, why = shown(text, stops, sizes)
    assert ("".join(part for part, _ in parts), why) == (said, reason)


@pytest.mark.parametrize(
    ("stop", "said", "taken"),
    [
        ("<|user|>", "ab", 3),  # a special token that is not shown
        ("b<|user|>c", "a", 4),  # what was shown before it waits
        ("<|user|>c", "ab", 4),
        ("<|user|>d", "abcd", 5),
    ],
)
def test_stop_strings_are_looked_for_in_all_tokens(stop, said, taken) -> None:
    tokenizer = byte_tokenizer()
    known = from_tokenizer(tokenizer)
    answer = AnswerText(tokenizer, lambda token: known.decode_bytes([token]), [stop])
    assert said_of(answer, tokenizer("ab<|user|>cd")["input_ids"]) == (said, taken)


@pytest.mark.parametrize(
    ("least", "said", "taken"),
    [(0, "", 2), (3, "ab", 4), (5, "abab", 5), (6, "ababx", 7), (9, "ababxab", 7)],
)
def test_no_stop_ends_an_answer_of_too_few_tokens(least, said, taken) -> None:
    """Neither one that is complete too early, and overlaps with what comes later."""
    tokenizer = byte_tokenizer()
    known = from_tokenizer(tokenizer)
    tokens = tokenizer("ababxab")["input_ids"]
    answer = AnswerText(
        tokenizer, lambda token: known.decode_bytes([token]), ["ab", "abx" * 9],
        frozenset(tokens[4:5]), least=least,
    )  # fmt: skip
    assert said_of(answer, tokens) == (said, taken) and taken >= min(least, len(tokens))


def test_bytes_that_a_decoder_waits_for_are_compared_and_shown() -> None:
    """As the line breaks of Llama 2 are."""
    tokenizer = byte_fallback_tokenizer()
    known = from_tokenizer(tokenizer)
    a, b, end = tokenizer.convert_tokens_to_ids(["▁a", "▁b", "<0x0A>"])
    for stops, ids, said in ((["\n"], (), " a"), ([" a\n"], (), ""), ([], {b}, " a\n")):
        answer = AnswerText(
            tokenizer, lambda t: known.decode_bytes([t]), stops, frozenset(ids), prompt=[b]
        )
        reasons = [answer(token) for token in (a, end, *ids)]
        assert reasons[-1] == "stop_string" and not any(reasons[:-1])
        assert "".join(part for part, _ in answer.show([False] * len(reasons), True)) == said


def test_marks_of_calls_are_text_though_they_are_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in (BEGIN, END)])
    tokens = tokenizer(f"so<|user|>{BEGIN}x{END}")["input_ids"]
    for marks, said in (((BEGIN, END), f"so{BEGIN}x{END}"), ((), "sox")):
        answer = AnswerText(tokenizer, lambda _: b"", marks=marks)
        assert not any(map(answer, tokens))
        assert "".join(part for part, _ in answer.show([False] * len(tokens), True)) == said


def test_parts_say_what_was_drafted() -> None:
    assert shown("abcdef", [], [3, 1, 2])[0] == [
        ("ab", True), ("c", False), ("d", False), ("e", True), ("f", False),
    ]  # fmt: skip


def test_what_may_begin_a_mark_is_held() -> None:
    assert [held(text, ["<tool>", "ab"]) for text in ("", "x", "x<to", "a<", "xa")] == [
        0,
        0,
        3,
        1,
        1,
    ]


@pytest.mark.parametrize(
    "written",
    ['{"a": "é"}', '"{\\"a\\": \\"é\\"}"', "null", '""', None],
    ids=["object", "text", "null", "empty", "none"],
)
def test_arguments_are_encoded_once(written) -> None:
    given = "" if written is None else f', "arguments": {written}'
    [call] = ToolCalls().add(f'{BEGIN}{{"name": "f"{given}}}{END}', True)[1]
    arguments = '{"a": "é"}' if "é" in (written or "") else "{}"
    assert call["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (False, 1)])
def test_only_one_call_is_given_where_several_are_not_wanted(parallel, count) -> None:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "parallel_tool_calls": parallel}
    )
    choice = Choice(SimpleNamespace(choice=0), None, asked, ToolCalls())  # type: ignore[arg-type]
    for reason in (None, "stop"):
        choice.add(Piece([(CALL, False)], [], None, [], reason))
    assert len(choice.calls) == count and choice.finish_reason == "tool_calls"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_are_taken_out_of_the_text(size) -> None:
    text = f"so <b> {CALL}{CALL} and <tool_call>nothing</tool_call> <tool"
    tools, content, calls = ToolCalls(), "", []
    for start in range(0, len(text), size):
        said, called = tools.add(text[start : start + size], start + size >= len(text))
        content, calls = content + said, calls + called
    assert content == "so <b>  and <tool_call>nothing</tool_call> <tool"
    assert [call["index"] for call in calls] == [0, 1]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert calls[0]["id"] != calls[1]["id"]
