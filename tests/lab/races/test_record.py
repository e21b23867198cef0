"""Prompts of the measuring verbs: rendered with what their rows bring, or left out by name."""

import json
from pathlib import Path

import pytest
from tiny import byte_tokenizer, tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.lab.races.record import read_prompts

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}<|assistant|>{{ effort or '' }}"
)
ASKED = {"messages": [{"role": "user", "content": "hi"}]}


def decoder() -> Decoder:
    """A model that has no embedding for the last token of its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(vocab_size=len(tokenizer))
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    return Decoder(Target(model, tokenizer))


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_have_the_arguments_of_their_rows(tmp_path: Path) -> None:
    rows = [ASKED, ASKED | {"tools": [{"name": "f"}], "chat_template_kwargs": {"effort": "low"}}]
    made, source = decoder(), write(tmp_path / "a.jsonl", *rows)
    prompts = read_prompts(source, 5, made, 8, {"effort": "high"})
    shown = [made.tokenizer.decode(prompt.ids) for prompt in prompts]
    assert shown == ["hi<|assistant|>high", "fhi<|assistant|>low"]
    with pytest.raises(UserError, match="does not read efort"):
        read_prompts(source, 5, made, 8, {"efort": "high"})


def test_a_prompt_may_be_in_any_column(tmp_path: Path) -> None:
    made, source = decoder(), write(tmp_path / "a.jsonl", {"text": "no", "task": "hi"})
    [prompt] = read_prompts(source, 5, made, 8, prompt_column="task")
    assert made.tokenizer.decode(prompt.ids) == "hi<|assistant|>"


def test_rows_that_cannot_be_asked_are_left_out_and_named(tmp_path: Path, caplog) -> None:
    system = {"messages": [{"role": "system", "content": "s"}]}
    lacking = {"messages": [{"role": "user", "content": "<new>"}]}
    source = write(tmp_path / "a.jsonl", {"prompt": 3}, system, lacking, ASKED)
    assert len(read_prompts(source, 5, decoder(), 8)) == 1
    [message] = caplog.messages
    assert "3 of 4 rows are left out" in message
    for reason in ("must be text", "has no user message", "<new>, and the model has only"):
        assert reason in message
    with pytest.raises(UserError, match="no row can be used; the first: row 1 of"):
        read_prompts(write(tmp_path / "b.jsonl", system), 5, decoder(), 8)
