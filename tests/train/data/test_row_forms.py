"""What rows hold beside their messages, and rows that cannot be used: read, or named."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tiny import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from drafthead.core.errors import UserError
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.fitted_rows import Reading, fitted_rows
from drafthead.train.data.left_out import LeftOut
from drafthead.train.data.supervision import supervised_sequences
from drafthead.train.data.training_rows import load_packed
from drafthead.train.settings import DataConfig

ASKED, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}
SYSTEM = {"role": "system", "content": "short"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
# Writes all that rows may bring; what it gets beside that would be an error of the reader.
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if documents %}D{{ documents | tojson }}"
    "{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}R{{ m.reasoning_content }}R{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}C{{ call.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if quick %}Q{% endif %}{% endif %}"
)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def write(path: Path, *rows: object) -> Path:
    """JSON lines, or Parquet by the name of the file."""
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, *rows: object) -> tuple[list[Conversation], LeftOut]:
    left_out = LeftOut()
    return read_conversations(write(path, *rows), left_out=left_out), left_out


def shown(conversation: Conversation) -> str:
    """What training reads of a row."""
    [marked] = supervised_sequences(tokenizer(), conversation)
    return str(tokenizer().decode(marked.input_ids))


# --------------------------------------------------------------------------- columns


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWER]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}]},
        {"instruction": "a", "input": "", "output": "bc"},
        {"prompt": "a", "completion": "bc"},
    ],
)
def test_a_system_message_in_a_column_is_the_first_message(
    tmp_path: Path, row: dict[str, Any], column: str
) -> None:
    [conversation], left_out = read(tmp_path / "a.jsonl", {**row, column: "short"})
    assert conversation.messages == [SYSTEM, ASKED, ANSWER]
    assert left_out.sentences() == []


def test_a_second_system_message_is_named_and_the_same_one_is_not(tmp_path: Path) -> None:
    rows = [{"messages": [SYSTEM, ASKED, ANSWER], "system": text} for text in ("short", "long")]
    conversations, left_out = read(tmp_path / "a.jsonl", *rows)
    assert [c.messages for c in conversations] == [[SYSTEM, ASKED, ANSWER]] * 2
    assert left_out.sentences() == ["not read: column `system` (1 rows)"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_earlier_turns_go_before_the_prompt(tmp_path: Path, suffix: str) -> None:
    row = {"instruction": "c", "output": "d", "history": [["a", "bc"]], "system": "short"}
    [conversation], _ = read(tmp_path / f"a.{suffix}", row)
    last = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    assert conversation.messages == [SYSTEM, ASKED, ANSWER, *last]


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_and_documents_are_arguments_of_the_template(tmp_path: Path, given: object) -> None:
    documents = [{"title": "t", "text": "u"}]
    row = {"messages": [ASKED, ANSWER], "tools": given, "documents": documents}
    [conversation], left_out = read(tmp_path / "a.jsonl", row)
    wanted = tokenizer().apply_chat_template(
        [ASKED, ANSWER], tools=[TOOL], documents=documents, tokenize=False
    )
    assert shown(conversation) == wanted and '"name": "f"' in wanted
    assert left_out.sentences() == []


def test_arguments_of_a_row_go_before_those_of_the_reader(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASKED, ANSWER], "chat_template_kwargs": {"quick": quick}}
        for quick in (True, False)
    ]
    quick, slow = read(tmp_path / "a.jsonl", *rows)[0]
    assert quick.template_arguments == {"quick": True}
    left_out = LeftOut()
    fit = Reading("", None, 64, None, template_arguments={"quick": True})
    found = fitted_rows(tokenizer("{{ quick }}" + TEMPLATE), [quick, slow], fit, left_out)
    texts = [tokenizer().decode(row.input_ids) for row in found]
    assert [text.partition("<")[0] for text in texts] == ["True", "False"]


def test_nulls_that_arrow_fills_in_reach_no_template(tmp_path: Path) -> None:
    """All rows of a column have the same fields in Arrow; a null in JSON is what it says."""
    other = {"type": "function", "function": {"name": "g", "parameters": {"z": {"type": "int"}}}}
    rows = [
        {"messages": [ASKED, {**ANSWER, "tool_calls": [CALL]}], "tools": [TOOL]},
        {"messages": [ASKED, {**ANSWER, "reasoning_content": "r"}], "tools": [other]},
        {"messages": [ASKED, ANSWER], "tools": None},
    ]
    from_json, _ = read(tmp_path / "a.jsonl", *rows)
    from_arrow, _ = read(tmp_path / "a.parquet", *rows)
    assert [shown(c) for c in from_arrow] == [shown(c) for c in from_json]
    assert "null" not in "".join(map(shown, from_arrow))
    allowed = {"name": "f", "parameters": {"enum": ["a", None], "default": None}}
    [conversation], _ = read(tmp_path / "b.jsonl", {**rows[0], "tools": [allowed]})
    assert conversation.template_arguments == {"tools": [allowed]}


def test_calls_and_reasoning_of_sharegpt_messages_are_learnt(tmp_path: Path) -> None:
    answer = {"from": "gpt", "value": None, "tool_calls": [CALL], "reasoning_content": "r"}
    [conversation], _ = read(
        tmp_path / "a.jsonl", {"conversations": [{"from": "human", "value": "a"}, answer]}
    )
    assert shown(conversation).endswith(
        '<|assistant|>RrRC{"name": "f", "arguments": {"x": "y"}}<|end|>'
    )


def test_columns_that_nobody_reads_are_named_once(tmp_path: Path, caplog) -> None:
    row = {"id": 1, "category": "c", "messages": [ASKED, ANSWER], "score": 2, "empty": None}
    path = write(tmp_path / "a.jsonl", row, {**row, "chosen": "x"}, row)
    read_conversations(path)
    assert caplog.messages == [
        f"{path}: not read: column `score` (3 rows), column `chosen` (1 rows)"
    ]


def test_what_the_template_knows_nothing_of_is_named(tmp_path: Path, caplog, cache_folder) -> None:
    answer = {**ANSWER, "reasoning_content": "r"}
    path = write(tmp_path / "a.jsonl", {"messages": [ASKED, answer], "tools": [TOOL]})
    load_packed({str(path): 1.0}, byte_tokenizer(), DataConfig("", max_length=64), seed=0)
    assert "argument `tools`, of which the chat template knows nothing" in caplog.text
    assert "key of messages `reasoning_content`, of which" in caplog.text


@pytest.fixture
def cache_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ------------------------------------------------------------------------ rows left out

BAD = {
    "unknown role": {"conversations": [{"from": "bing", "value": "a"}]},
    "a message of role `user` has no content": {"messages": [{"role": "user", "content": None}]},
    "found one of type `image`": {
        "messages": [{"role": "user", "content": [{"type": "image", "text": None}]}, ANSWER]
    },
    "half of a character (U+D83D)": {"messages": [{"role": "user", "content": "\ud83d"}, ANSWER]},
    "`tools` must be a list of objects": {"messages": [ASKED, ANSWER], "tools": {"x": 1}},
    "`chat_template_kwargs` sets `tokenize`": {
        "prompt": "a", "chat_template_kwargs": {"tokenize": True},
    },
    "`history` must hold pairs": {"instruction": "a", "history": ["b"]},
    "`question` is null": {"question": None, "answer": "b"},
    "`messages` must be a list, found dict": {"messages": {"role": "user"}},
    "there are no messages": {"messages": []},
    "expected a JSON object, found int": 3,
    "must be a list of token ids": {"prompt": "a", "token_ids": [{"prompt": [1], "answer": ["b"]}]},
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_left_out_and_named_with_its_line(tmp_path: Path, reason: str) -> None:
    good = {"messages": [ASKED, ANSWER]}
    conversations, left_out = read(tmp_path / "a.jsonl", good, BAD[reason], good)
    assert [c.source[-2:] for c in conversations] == [":1", ":3"]
    assert (left_out.rows, left_out.unusable) == (3, 1)
    [problem] = left_out.problems
    assert f"{tmp_path}/a.jsonl, line 2: " in problem and reason in problem


def test_five_rows_are_named_and_the_others_counted(tmp_path: Path, caplog) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, *[{"prompt": 3}] * 7)
    read_conversations(path)
    [message] = caplog.messages
    assert "7 of 8 rows are left out" in message and message.endswith("and 2 more")
    assert message.count("must be text") == 5


def test_a_strict_reader_ends_at_the_first_bad_row(tmp_path: Path, cache_folder) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWER]}, {"prompt": 3})
    with pytest.raises(UserError, match="line 2: .*must be text.*strict"):
        read_conversations(path, left_out=LeftOut(strict=True))
    for strict in (False, True, True):  # also of what another run has left in the cache
        config = DataConfig("", max_length=64, strict=strict)
        if strict:
            with pytest.raises(UserError, match="line 2: .*must be text.*strict"):
                load_packed({str(path): 1.0}, byte_tokenizer(), config, seed=0)
        else:
            load_packed({str(path): 1.0}, byte_tokenizer(), config, seed=0)


def test_nulls_of_parquet_are_no_missing_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"question": "a"}, {"question": None})
    left_out = LeftOut()
    assert len(read_conversations(path, left_out=left_out)) == 1
    assert "row 2: `question` is null; known columns" in left_out.problems[0]
    left_out = LeftOut()
    assert len(read_conversations(path, "question", left_out=left_out)) == 1
    assert left_out.problems == [f"{path}, row 2: `question` is null"]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"content": "b", "tool_calls": [CALL]}, "does not write the `tool_calls` of an answer"),
        ({"content": "", "reasoning_content": "r"}, "an answer that ends at once would be learnt"),
    ],
)
def test_answers_that_the_template_does_not_write_are_left_out(
    answer: dict[str, Any], sentence: str
) -> None:
    """A template without calls would teach an end in their place."""
    conversation = Conversation("a", [ASKED, {"role": "assistant", **answer}], "f:1")
    with pytest.raises(UserError, match=sentence):
        supervised_sequences(byte_tokenizer(), conversation)


def test_tokens_that_the_model_lacks_are_left_out_and_named() -> None:
    extended = byte_tokenizer()
    size = len(extended)
    extended.add_tokens(["<tool>"], special_tokens=True)
    rows = [
        Conversation(name, [ASKED, {"role": "assistant", "content": f"bc{name}"}], f"f:{name}")
        for name in ("x", "<tool>")
    ]
    left_out = LeftOut(rows=2)
    assert len(list(fitted_rows(extended, rows, Reading("", None, 64, None, size), left_out))) == 1
    assert left_out.problems == [
        f"row <tool> of f holds token {size} <tool>, and the model has only {size} tokens: resize "
        "the model, or take its own tokenizer"
    ]
    assert (
        len(list(fitted_rows(extended, rows, Reading("", None, 64, None, size + 1), LeftOut())))
        == 2
    )


def test_answers_of_one_token_teach_nothing() -> None:
    one = Conversation("a", [ASKED, {**ANSWER, "content": "b", "finished": False}], "f:1")
    two = Conversation("b", [ASKED, {**ANSWER, "content": "b"}], "f:2")
    left_out = LeftOut(rows=2)
    [kept] = fitted_rows(byte_tokenizer(), [one, two], Reading("", None, 64, None), left_out)
    assert sum(kept.mask) == 2 and "row 1 of f teaches nothing" in left_out.problems[0]
    with pytest.raises(
        UserError, match="no row can be used; the first: row 1 of f teaches nothing"
    ):
        list(fitted_rows(byte_tokenizer(), [one], Reading("", None, 64, None), LeftOut()))


def test_a_template_that_writes_messages_as_a_whole_hides_no_calls() -> None:
    whole = tokenizer(
        "{% for m in messages %}<|{{ m.role }}|>{{ m | tojson }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    [marked] = supervised_sequences(whole, Conversation("a", [ASKED, answer], "f:1"))
    assert any(marked.mask)
