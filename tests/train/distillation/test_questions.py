"""What is asked: samples, system messages, arguments of the chat template, and cut answers."""

from dataclasses import replace
from pathlib import Path

import pytest
from distilled import SETTINGS, FakeDecoder, asked, distilled, rows_by_id
from tiny import CHAT_TEMPLATE, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import check_template_arguments
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.supervision import supervised_sequences
from drafthead.train.distillation.dialogue import sampled, with_system

WARM = replace(SETTINGS, temperature=1.0)
THINKING = CHAT_TEMPLATE.replace(
    "{{ '<|assistant|>' }}",
    "{{ '<|assistant|>' }}{% if enable_thinking is false %}{{ 'no ' }}{% endif %}",
)


def thinking_tokenizer() -> PreTrainedTokenizerFast:
    """Its prompts end with a word where thinking is switched off."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


def test_samples_have_ids_of_their_own_and_other_answers(output: Path) -> None:
    distilled(FakeDecoder(), sampled(asked(2), 3, 1.0), output, WARM)
    rows = rows_by_id(output)
    assert set(rows) == {f"row-{i}{end}" for i in (0, 1) for end in ("", "#2", "#3")}
    answers = {row["messages"][-1]["content"] for row in rows.values()}
    assert len(answers) == 6
    assert rows["row-1#2"]["source"] == "prompts.jsonl:2"


def test_more_samples_are_added_and_the_first_ones_kept(output: Path, tmp_path: Path) -> None:
    distilled(FakeDecoder(), sampled(asked(3), 1, 1.0), output, WARM)
    before = output.read_bytes()
    report = distilled(FakeDecoder(), sampled(asked(3), 4, 1.0), output, WARM)
    assert (report.already_done, report.written) == (3, 9)
    assert output.read_bytes().startswith(before)
    at_once = tmp_path / "at_once.jsonl"
    distilled(FakeDecoder(), sampled(asked(3), 4, 1.0), at_once, WARM)
    assert rows_by_id(output) == rows_by_id(at_once)


def test_samples_that_would_be_the_same_are_refused() -> None:
    with pytest.raises(UserError, match="--samples 2 at temperature 0 .* the same answer 2 times"):
        sampled(asked(1), 2, 0.0)
    with pytest.raises(UserError, match="--samples must be at least 1, got 0"):
        sampled(asked(1), 0, 1.0)
    assert sampled(asked(2), 1, 0.0) == asked(2)


def test_an_id_that_looks_like_a_sample_is_refused(tmp_path: Path) -> None:
    """Of two rows with the same id the reader calls the second ID#2."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"id": "a", "prompt": "two"}\n')
    with pytest.raises(UserError, match=r"row 2 of .*prompts.jsonl: the id a#2"):
        sampled(read_conversations(prompts), 2, 1.0)


def test_a_system_message_is_added_where_there_is_none(output: Path) -> None:
    own = {"role": "system", "content": "own"}
    prompts = asked(2)
    prompts[1] = replace(prompts[1], messages=[own, *prompts[1].messages])
    settings = replace(SETTINGS, system="be short")
    distilled(FakeDecoder(), with_system(prompts, "be short"), output, settings)
    first, second = (rows_by_id(output)[f"row-{i}"]["messages"] for i in (0, 1))
    assert first[0] == {"role": "system", "content": "be short"}
    assert second[0] == own
    assert [m["role"] for m in first] == ["system", "user", "assistant"]
    with pytest.raises(UserError, match="was started with system 'be short', now None"):
        distilled(FakeDecoder(), prompts, output)


def test_an_empty_system_message_is_refused() -> None:
    with pytest.raises(UserError, match="the system message is empty"):
        replace(SETTINGS, system=" \n")


def test_template_arguments_reach_every_prompt_and_the_row(output: Path) -> None:
    decoder = FakeDecoder(tokenizer=thinking_tokenizer())
    settings = replace(SETTINGS, template_arguments={"enable_thinking": False})
    distilled(decoder, asked(1, turns=2), output, settings)
    row = rows_by_id(output)["row-0"]
    assert row["chat_template_kwargs"] == {"enable_thinking": False}
    prompts = [decoder.tokenizer.decode(ids["prompt"]) for ids in row["token_ids"]]
    assert all(prompt.endswith("<|assistant|>no ") for prompt in prompts)
    [conversation] = read_conversations(output)
    learnt = supervised_sequences(decoder.tokenizer, conversation)
    assert (
        learnt[0].input_ids[: len(row["token_ids"][0]["prompt"])] == (row["token_ids"][0]["prompt"])
    )
    with pytest.raises(UserError, match="with template_arguments {'enable_thinking': False}"):
        distilled(decoder, asked(1, turns=2), output)


def test_what_a_row_brings_for_the_template_is_asked_and_written(output: Path) -> None:
    """So a file that was distilled and lost its ids is rendered as it was asked."""
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = "{{ tools[0].name }}" + THINKING
    decoder, tool = FakeDecoder(tokenizer=tokenizer), {"name": "f"}
    own = {"enable_thinking": False, "tools": [tool]}
    prompts = [replace(asked(1)[0], template_arguments=own)]
    settings = replace(SETTINGS, template_arguments={"enable_thinking": True})
    distilled(decoder, prompts, output, settings)
    row = rows_by_id(output)["row-0"]
    assert row["chat_template_kwargs"] == {"enable_thinking": False} and row["tools"] == [tool]
    prompt = decoder.tokenizer.decode(row["token_ids"][0]["prompt"])
    assert prompt.startswith("f<|user|>") and prompt.endswith("<|assistant|>no ")
    [conversation] = read_conversations(output)
    assert conversation.template_arguments == own
    other = [replace(prompts[0], template_arguments=own | {"tools": [{"name": "g"}]})]
    with pytest.raises(UserError, match="the prompts have changed"):
        distilled(decoder, other, output, settings)


def test_rows_that_cannot_be_asked_are_left_out_and_named(output: Path, caplog) -> None:
    prompts, decoder = asked(4), FakeDecoder()
    size = decoder.target.vocab_size
    decoder.tokenizer.add_tokens([f"<{i}>" for i in range(size)], special_tokens=True)
    prompts[1] = replace(prompts[1], messages=[{"role": "tool", "content": "42"}])
    prompts[3] = replace(prompts[3], messages=[{"role": "user", "content": f"<{size - 1}>"}])
    report = distilled(decoder, sampled(prompts, 2, 1.0), output, WARM)
    assert report.written == 4 and {"row-0", "row-2#2"} < set(rows_by_id(output))
    assert "2 of 8 rows are left out; the first: row 2 of" in caplog.text
    assert f"and the model has only {size} tokens" in caplog.text
    with pytest.raises(UserError, match="no row can be used; the first: .*role `tool`"):
        distilled(FakeDecoder(), prompts[1:2], output.with_name("other.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"enable_thinking_": 1}, "does not read enable_thinking_"),
        ({"thinking": 1}, "does not read thinking"),
        ({"add_generation_prompt": False}, "add_generation_prompt is set by drafthead"),
        ({"tokenize": True}, "tokenize is set by drafthead"),
    ],
)
def test_arguments_that_the_template_does_not_read_are_refused(
    arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check_template_arguments(thinking_tokenizer(), arguments)
    check_template_arguments(thinking_tokenizer(), {"enable_thinking": None})


def test_a_base_model_has_no_template_arguments() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template, so the template argument a"):
        check_template_arguments(tokenizer, {"a": 1})


class LongFirst(FakeDecoder):
    """The answer to the longest prompts is cut."""

    def answer(self, request, batch, limit):
        self.answer_tokens = 30 if len(request.prompt) > 6 else 8
        return super().answer(request, batch, limit)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
@pytest.mark.usefixtures("one_batch_in_a_window")
def test_rows_with_a_cut_answer_are_left_out_for_good(output: Path, batch_size: int) -> None:
    settings = replace(SETTINGS, drop_cut=True, batch_size=batch_size)
    report = distilled(LongFirst(), asked(6), output, settings)
    assert (report.written, report.dropped) == (3, 3)
    assert set(rows_by_id(output)) == {"row-0", "row-1", "row-2"}
    decoder = LongFirst()
    again = distilled(decoder, asked(6), output, settings)
    assert (again.already_done, again.written, again.dropped) == (3, 0, 3)
    assert not decoder.batches
    assert distilled(decoder, asked(7), output, settings).dropped == 4


def test_a_conversation_is_not_continued_after_a_cut_answer(output: Path) -> None:
    decoder = LongFirst()
    settings = replace(SETTINGS, drop_cut=True)
    long = Conversation("a", [{"role": "user", "content": "xxxxxx"}] * 3, "prompts.jsonl:1")
    report = distilled(decoder, [long], output, settings)
    assert (report.dropped, report.shortened, len(decoder.batches)) == (1, (), 1)
