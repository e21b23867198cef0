"""Distillation: what the rows say, what resuming keeps, and prompts that do not fit."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest
from distilled import SETTINGS, FakeDecoder, asked, distilled, rows_by_id
from tiny import byte_tokenizer, target_folder, tiny_llama, write_target
from transformers import LlamaForCausalLM
from typer import Typer
from typer.testing import CliRunner

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.scripts.data import distill as distill_verb
from drafthead.scripts.options import with_groups
from drafthead.train.data.conversations import Conversation, read_conversations, row_seed
from drafthead.train.data.row_forms import Message
from drafthead.train.data.supervision import Rendering, supervise
from drafthead.train.distillation.dialogue import question_of, user_turns
from drafthead.train.jobs.outputs import manifest_path
from drafthead.train.settings import DistillSettings

pytestmark = pytest.mark.usefixtures("one_batch_in_a_window")


def test_rows_hold_question_answer_settings_and_source(output: Path) -> None:
    decoder = FakeDecoder()
    report = distilled(decoder, asked(3), output)
    row = rows_by_id(output)["row-2"]
    question, answer = row.pop("messages")
    assert question == {"role": "user", "content": "0xx"}
    assert answer["role"] == "assistant"
    assert len(answer["content"]) == 8
    [ids] = row.pop("token_ids")
    del row["question"], row["target_weights"]
    assert decoder.tokenizer.decode(ids["prompt"]) == "<|user|>0xx<|end|><|assistant|>"
    assert decoder.tokenizer.decode(ids["answer"]) == answer["content"] + "<|end|>"
    assert row.pop("vocabulary") == vocabulary_of(decoder.tokenizer)
    assert row == {
        "id": "row-2",
        "finished": True,
        "tokens": 9,
        "target": "fake",
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "source": "prompts.jsonl:3",
        "finish_reasons": ["end_token"],
    }
    assert (report.already_done, report.written, report.tokens) == (0, 3, 27)


def test_the_output_is_training_data(output: Path) -> None:
    decoder = FakeDecoder()
    distilled(decoder, asked(1, turns=2), output)
    [conversation] = read_conversations(output)
    marked = supervise(Rendering(decoder.tokenizer, "the row"), conversation.messages)
    assert sum(marked.mask) == 2 * 9


def test_an_answer_cut_at_the_limit_is_marked_and_teaches_no_end(output: Path) -> None:
    decoder = FakeDecoder()
    settings = DistillSettings("fake", "prompts.jsonl", max_new_tokens=5)
    report = distilled(decoder, asked(1), output, settings)
    [conversation] = read_conversations(output)
    assert not rows_by_id(output)["row-0"]["finished"]
    assert report.statistics.ended == {"length": 1}
    marked = supervise(Rendering(decoder.tokenizer, "the row"), conversation.messages)
    assert sum(marked.mask) == 5


def test_an_answer_cut_within_a_character_ends_before_it(output: Path) -> None:
    class HalfCharacter(FakeDecoder):
        def answer(self, request: ServeRequest, *_: object) -> Answer:
            return Answer(request.id, self.tokenizer("four 日")["input_ids"][:-1])

    distilled(HalfCharacter(), asked(1), output)
    assert rows_by_id(output)["row-0"]["messages"][-1]["content"] == "four "


def test_every_user_turn_is_answered_after_the_targets_own_answers(output: Path) -> None:
    decoder = FakeDecoder()
    system: Message = {"role": "system", "content": "s"}
    stranger: Message = {"role": "assistant", "content": "another model's"}
    first, second = ({"role": "user", "content": text} for text in ("one", "two"))
    conversation = Conversation("a", [system, first, stranger, second], "prompts.jsonl:1")
    distilled(decoder, [conversation], output)
    messages = rows_by_id(output)["a"]["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    start = "<|system|>s<|end|><|user|>one<|end|><|assistant|>"
    later = f"{start}{messages[2]['content']}<|end|><|user|>two<|end|><|assistant|>"
    assert decoder.batches == [[start], [later]]


def test_batches_do_not_change_the_answers(output: Path, tmp_path: Path) -> None:
    prompts = asked(7) + [Conversation(f"long-{c.id}", c.messages, c.source) for c in asked(5, 3)]
    distilled(FakeDecoder(), prompts, output, replace(SETTINGS, batch_size=1))
    distilled(FakeDecoder(), prompts, tmp_path / "other.jsonl", replace(SETTINGS, batch_size=5))
    assert rows_by_id(output) == rows_by_id(tmp_path / "other.jsonl")


def test_rows_are_on_disk_before_the_next_batch_begins(output: Path) -> None:
    lines_seen = []

    class Watching(FakeDecoder):
        def serve(self, requests: Queue, **options: object) -> Iterator[Answer]:
            lines_seen.append(output.read_bytes().count(b"\n") if output.exists() else 0)
            return super().serve(requests, **options)

    distilled(Watching(), asked(6), output, replace(SETTINGS, batch_size=2))
    assert lines_seen == [0, 2, 4]


def test_the_longest_prompts_come_first(output: Path) -> None:
    distilled(FakeDecoder(), asked(5), output, replace(SETTINGS, batch_size=2))
    assert list(rows_by_id(output)) == ["row-4", "row-3", "row-2", "row-1", "row-0"]


def test_seeds_follow_from_seed_row_and_turn() -> None:
    seeds = {row_seed(s, name, turn) for s in (0, 1) for name in ("a", "b") for turn in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(0, "a", 0) == row_seed(0, "a", 0)


def test_a_second_run_adds_only_what_is_missing(output: Path) -> None:
    distilled(FakeDecoder(), asked(3), output)
    before = output.read_bytes()
    decoder = FakeDecoder()
    report = distilled(decoder, asked(5), output)
    assert (report.already_done, report.written) == (3, 2)
    assert output.read_bytes().startswith(before)
    assert len(rows_by_id(output)) == 5
    assert distilled(decoder, asked(5), output).written == 0


def test_the_bar_counts_answers_and_their_tokens(output: Path, capsys) -> None:
    distilled(FakeDecoder(), asked(2, turns=3), output)
    assert "6/6" in capsys.readouterr().err
    distilled(FakeDecoder(), asked(3, turns=3), output)
    shown = capsys.readouterr().err
    assert " 6/9 " in shown and " 9/9 " in shown
    assert "27 tokens in answers that ended, " in shown


def test_other_weights_under_the_same_name_are_refused(output: Path) -> None:
    distilled(FakeDecoder(), asked(2), output)
    before = output.read_bytes()
    retrained = FakeDecoder(target=Target(tiny_llama(seed=1)))
    with pytest.raises(UserError, match="the weights of fake are no longer those"):
        distilled(retrained, asked(3), output)
    assert output.read_bytes() == before


def test_rows_that_a_user_took_out_are_answered_again_and_others_kept(output: Path) -> None:
    settings = replace(SETTINGS, batch_size=3)
    distilled(FakeDecoder(), asked(8), output, settings)
    before = rows_by_id(output)
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:1] + lines[2:7]))
    report = distilled(FakeDecoder(), asked(8), output, settings)
    assert (report.already_done, report.written) == (5, 3)
    assert rows_by_id(output) == before


def test_changed_prompts_are_not_taken_as_answered(output: Path) -> None:
    distilled(FakeDecoder(), asked(2), output)
    before = output.read_bytes()
    changed = [replace(c, messages=[{"role": "user", "content": "other"}]) for c in asked(2)]
    with pytest.raises(UserError, match=r"row 1 of prompts.jsonl is not what row row-0 of"):
        distilled(FakeDecoder(), changed, output)
    assert output.read_bytes() == before
    assert distilled(FakeDecoder(), changed, output, overwrite=True).written == 2


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("target", replace(SETTINGS, target="other")),
        ("max_new_tokens", replace(SETTINGS, max_new_tokens=21)),
        (
            "temperature",
            DistillSettings("fake", "prompts.jsonl", max_new_tokens=20, temperature=1.0),
        ),
        ("seed", replace(SETTINGS, seed=3)),
        ("batch_size", replace(SETTINGS, batch_size=7)),
    ],
)
def test_other_settings_are_refused_by_name(
    output: Path, key: str, settings: DistillSettings
) -> None:
    distilled(FakeDecoder(), asked(2), output)
    before = output.read_bytes()
    with pytest.raises(UserError, match=rf"answers.jsonl was started with {key} .*--overwrite"):
        distilled(FakeDecoder(), asked(2), output, settings)
    assert output.read_bytes() == before
    distilled(FakeDecoder(), asked(1), output, settings, overwrite=True)
    assert len(rows_by_id(output)) == 1


def test_a_file_of_another_kind_is_not_touched(output: Path) -> None:
    output.write_text("notes\n")
    with pytest.raises(UserError, match=r"exists without a readable answers.jsonl.manifest"):
        distilled(FakeDecoder(), asked(1), output)
    assert output.read_text() == "notes\n"


def test_a_spoilt_row_names_its_line(output: Path) -> None:
    distilled(FakeDecoder(), asked(2), output)
    output.write_text(output.read_text() + "oops\n")
    with pytest.raises(UserError, match=r"answers.jsonl, line 3: not a row"):
        distilled(FakeDecoder(), asked(2), output)


def test_a_folder_of_outputs_reads_as_rows_alone(output: Path) -> None:
    distilled(FakeDecoder(), asked(2), output)
    assert manifest_path(output).exists()
    assert len(read_conversations(output.parent)) == 2


def test_prompts_longer_than_the_context_are_skipped_and_named(output: Path) -> None:
    decoder = FakeDecoder(max_length=8)  # the prompt of row i has i + 4 tokens
    report = distilled(decoder, asked(6), output)
    assert report.too_long == ("row-4", "row-5")
    assert set(rows_by_id(output)) == {"row-0", "row-1", "row-2", "row-3"}
    again = distilled(decoder, asked(6), output)
    assert (again.already_done, again.written, again.too_long) == (4, 0, report.too_long)


def test_only_too_long_prompts_are_an_error(output: Path) -> None:
    with pytest.raises(UserError, match="all 3 prompts are longer than the context of 2 tokens"):
        distilled(FakeDecoder(max_length=2), asked(3), output)


def test_turns_that_do_not_fit_are_left_out_and_named(output: Path) -> None:
    report = distilled(FakeDecoder(max_length=15), asked(2, turns=3), output)
    assert report.shortened == ("row-1", "row-0")
    for row in rows_by_id(output).values():
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]


def test_messages_that_cannot_be_replayed_are_refused() -> None:
    tool: Message = {"role": "tool", "content": "42"}
    with pytest.raises(UserError, match=r"row 4 of f.jsonl: a message of role `tool`"):
        user_turns(Conversation("a", [tool], "f.jsonl:4"))
    with pytest.raises(UserError, match=r"row 4 of f.jsonl: no user message"):
        user_turns(Conversation("a", [{"role": "system", "content": "s"}], "f.jsonl:4"))


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_settings_without_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} must"):
        DistillSettings("fake", "prompts.jsonl", **wrong)


tiny_target = target_folder(max_position_embeddings=64, initializer_range=0.5)


def test_greedy_answers_are_those_of_the_target(tiny_target: Path, output: Path) -> None:
    decoder = Decoder.from_pretrained(tiny_target, dtype="float32", device="cpu")
    settings = DistillSettings(str(tiny_target), "prompts.jsonl", max_new_tokens=12)
    prompts = asked(5)
    distilled(decoder, prompts, output, replace(settings, batch_size=3))
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    tokenizer = byte_tokenizer()
    rows = rows_by_id(output)
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert rows[prompt.id]["token_ids"][0]["answer"] == new.tolist()


def test_an_answer_that_repeats_itself_is_ended_and_teaches_no_end(
    tmp_path: Path, output: Path
) -> None:
    """Greedy answers of a random model soon do."""
    write_target(tmp_path / "long", max_position_embeddings=512, initializer_range=0.02)
    decoder = Decoder.from_pretrained(tmp_path / "long", dtype="float32", device="cpu")
    settings = DistillSettings(str(tmp_path / "long"), "prompts.jsonl", max_new_tokens=300)
    whole = tmp_path / "whole.jsonl"
    distilled(decoder, asked(3), whole, replace(settings, end_repetition=False))
    report = distilled(decoder, asked(3), output, settings)
    assert report.statistics.ended == {"stopping_criteria": 3}
    for row, other in zip(rows_by_id(output).values(), rows_by_id(whole).values(), strict=True):
        answer = row["token_ids"][0]["answer"]
        assert 32 < len(answer) < 300
        assert answer == other["token_ids"][0]["answer"][: len(answer)]
        assert not row["finished"]


def test_sampled_answers_are_the_same_in_other_batches(
    tiny_target: Path, output: Path, tmp_path: Path
) -> None:
    decoder = Decoder.from_pretrained(tiny_target, dtype="float32", device="cpu")
    settings = DistillSettings(
        str(tiny_target), "prompts.jsonl", max_new_tokens=12, temperature=1.0, seed=5
    )
    distilled(decoder, asked(5), output, replace(settings, batch_size=5))
    distilled(decoder, asked(5), tmp_path / "single.jsonl", replace(settings, batch_size=1))
    assert rows_by_id(output) == rows_by_id(tmp_path / "single.jsonl")


def test_the_verb_writes_rows_and_reports(
    tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"task": "a"}, {"task": "b" * 80}, {"task": "c"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--target", tiny_target, "--prompts", prompts, "--output", tmp_path / "a.jsonl"]
    options = ["--prompt-column", "task", "--max-new-tokens", 4, "--limit", 2, "--dtype", "float32"]
    app = Typer()
    app.command()(with_groups(distill_verb.main))
    with caplog.at_level("INFO"):
        result = CliRunner().invoke(app, [str(part) for part in arguments + options])
    assert result.exit_code == 0
    assert set(rows_by_id(tmp_path / "a.jsonl")) == {"prompts.jsonl:1"}
    assert "1 of 2 conversations to answer: 1 answers, at most 4 new tokens" in caplog.text
    assert "1 prompts longer than the context were skipped: prompts.jsonl:2" in result.stdout


@pytest.mark.parametrize("other", [{"content": "b"}, {"role": "system"}, {"name": "Ann"}], ids=str)
def test_rows_that_differ_in_one_field_of_a_message_ask_another_question(other) -> None:
    first, question = {"role": "user", "content": "a"}, {"role": "user", "content": "c"}
    asked = [
        question_of(Conversation("0", [message, question], "rows.jsonl:1"))
        for message in (first, dict(first), first | other)
    ]
    assert asked[0] == asked[1] != asked[2]
