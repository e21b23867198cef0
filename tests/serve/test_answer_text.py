"""Text while its tokens come: stops, drafted parts and calls of tools."""

import pytest
from llguidance.hf import from_tokenizer
from tiny import byte_tokenizer

from drafthead.serve.answer_text import AnswerText, ToolCalls, held


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
