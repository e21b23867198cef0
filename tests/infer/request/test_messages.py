"""Calls of tools in messages: read in one way for answers and for training, and never lost."""

import json
from typing import Any

import pytest
from tiny import byte_tokenizer

from drafthead.core.errors import UserError
from drafthead.infer.request.messages import arguments_of, rendered
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.data.row_forms import content_of
from drafthead.train.data.row_sources import SourceRow
from drafthead.train.data.supervision import Rendering

LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
)
DROPS = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
# How templates write the arguments of a call, and what of {"city": "Øre"} and of none.
TEMPLATES = {
    "as JSON": ("{{ c.function.arguments | tojson }}", '{"city": "Øre"}', "{}"),
    "as they are": ("{{ c.function.arguments }}", '{"city": "Øre"}', "{}"),
    "joined": ("{{ '<' + c.function.arguments + '>' }}", '<{"city": "Øre"}>', "<{}>"),
    "of both kinds": (
        "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
        '{"city": "Øre"}',
        "{}",
    ),
    "one by one": (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        "city=Øre;",
        "",
    ),
}  # fmt: skip
GIVEN = {"city": "Øre"}
FORMS = [GIVEN, json.dumps(GIVEN), json.dumps(json.dumps(GIVEN))]
EMPTY = [{}, "{}", "", " ", None, "null"]


def conversation(**function: Any) -> list[dict[str, Any]]:
    """A call whose result says in Python's form what the arguments are."""
    calls = [{"function": {"name": "f", **function}}]
    return [
        {"role": "user", "content": f"It is {GIVEN}"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Cold."},
    ]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_every_form_are_written_as_the_template_reads_them(name) -> None:
    """For the prompt of an answer and for training."""
    code, full, empty = TEMPLATES[name]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = LOOP.replace("CALL", f"[{{{{ c.function.name }}}} {code}]")
    for forms, expected in ((FORMS, full), (EMPTY, empty)):
        for arguments in [*forms, *([...] if forms is EMPTY else [])]:
            function = {} if arguments is ... else {"arguments": arguments}
            messages = conversation(**function)
            text = rendered(messages, tokenizer, {}, False)
            start, end = f"<|user|>It is {GIVEN}<|end|><|assistant|>[f {expected}]", "Cold.<|end|>"
            assert text == f"{start}<|end|><|tool|>5<|end|><|assistant|>{end}", arguments
            read = content_of(SourceRow("rows", 1, "row", {"messages": messages}), None).messages
            assert Rendering(tokenizer, "row").text(read) == text


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", 5, [1], "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_and_rows_left_out(arguments) -> None:
    with pytest.raises((ValueError, RecursionError)):
        arguments_of(arguments)
    messages = conversation(arguments=arguments)
    with pytest.raises(UserError, match="arguments that are a JSON object"):
        rendered(messages, byte_tokenizer(), {}, False)
    with pytest.raises(UnusableRowError, match="rows, row 1: .*arguments that are a JSON object"):
        content_of(SourceRow("rows", 1, "row", {"messages": messages}), None)


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (LOOP.replace("CALL", ""), "calls of tools in the message of role 'assistant'"),
        (DROPS, "the message of role 'tool'"),
        ("{% for m in messages %}{{ m.content | upper }}{{ m.tool_calls }}{% endfor %}", None),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_of_tools_is_refused(template, lost) -> None:
    """Though other messages have the same text."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "f of 5"}, *conversation()[1:]]
    if lost is None:
        assert "F OF 5" in rendered(messages, tokenizer, {}, False)
        return
    with pytest.raises(UserError, match=f"writes nothing of the .*{lost[-20:]}") as refused:
        rendered(messages, tokenizer, {}, False)
    assert lost in str(refused.value)


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "context"])
@pytest.mark.parametrize("text", ["only here", "o", "f of 5"])
def test_a_question_that_a_template_drops_is_refused_whatever_its_role(role, text) -> None:
    """Also where another one has the same text, and only where it is dropped."""
    tokenizer, printed = byte_tokenizer(), "<|{{ m.role }}|>{{ m.content | upper }}<|end|>"
    other = "user" if role != "user" else "system"
    messages = [{"role": role, "content": text}, {"role": other, "content": "f of 5 only once"}]
    for loop in ("for m in messages", f"for m in messages if m.role != '{role}'"):
        tokenizer.chat_template = f"{{% {loop} %}}{printed}{{% endfor %}}"
        if "if" not in loop:
            assert f"<|{role}|>{text.upper()}<|end|>" in rendered(messages, tokenizer, {}, False)
            continue
        with pytest.raises(UserError, match=f"writes nothing of the message of role '{role}'"):
            rendered(messages, tokenizer, {}, False)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": 5},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": "\ud83d"},
        {"role": 5, "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5}}]},
    ],
)
def test_messages_of_a_wrong_form_are_refused_in_a_sentence(message) -> None:
    with pytest.raises(UserError):
        rendered([message], byte_tokenizer(), {}, False)
