"""Training learns the very tokens that the target generated, whatever their text looks like."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import SPECIALS, byte_tokenizer, write_target

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.infer import Decoder
from drafthead.infer.scheduling import running_rows
from drafthead.infer.scheduling.tickets import Gain
from drafthead.infer.serving import Answer
from drafthead.train.data.conversations import AnswerTokens, Conversation, read_conversations
from drafthead.train.data.sequences import SupervisedTokens
from drafthead.train.data.supervision import join_turns, supervised_sequences
from drafthead.train.data.training_rows import load_packed
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import distill
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.settings import DataConfig, DistillSettings


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A target of bytes and special tokens, so random that it emits all of them."""
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, max_position_embeddings=128, initializer_range=0.02, eos_token_id=1)
    return Decoder.from_pretrained(folder, dtype="float32", device="cpu")


def distilled(decoder: Decoder, folder: Path, rows: int = 40, turns: int = 1) -> Path:
    """Answers at temperature 1: mostly bytes that are no text, and special tokens."""
    messages = [{"role": "user", "content": f"{turn}"} for turn in range(turns)]
    prompts = [Conversation(f"{i}", messages, f"prompts.jsonl:{i + 1}") for i in range(rows)]
    settings = DistillSettings("target", "prompts.jsonl", max_new_tokens=24, temperature=1.0)
    with DistilledFile(folder / "answers.jsonl", settings) as file:
        distill(DecoderSource(decoder), prompts, file)
    return folder / "answers.jsonl"


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of all that is served from now on."""
    calls: list[tuple[list[int], list[int]]] = []
    answer_of = running_rows.answer_of

    def watched(gain: Gain, *arguments: Any) -> Answer:
        found = answer_of(gain, *arguments)
        calls.append((gain.ticket.request.prompts[0], found.tokens))
        return found

    monkeypatch.setattr(running_rows, "answer_of", watched)
    return calls


def test_training_reads_the_tokens_that_were_generated(
    decoder: Decoder, tmp_path: Path, generated: list
) -> None:
    file = distilled(decoder, tmp_path)
    data = load_packed({str(file): 1.0}, decoder.tokenizer, DataConfig("", max_length=64), seed=0)
    learnt = {
        (tuple(s.input_ids.tolist()), tuple(s.input_ids[s.supervised].tolist()))
        for s in data.sequences
    }
    assert learnt == {((*prompt, *answer), tuple(answer)) for prompt, answer in generated}
    specials = range(len(SPECIALS))
    assert any(set(answer[:-1]) & set(specials) for _, answer in generated), "none inside an answer"


def test_every_turn_is_learnt_as_it_was_generated(
    decoder: Decoder, tmp_path: Path, generated: list
) -> None:
    conversations = read_conversations(distilled(decoder, tmp_path, rows=12, turns=2))
    sequences = [s for c in conversations for s in supervised_sequences(decoder.tokenizer, c)]
    answers = [[i for i, m in zip(s.input_ids, s.mask, strict=True) if m] for s in sequences]
    # The second prompt shows the first answer as text, and these texts give other tokens.
    assert sorted(answers) == sorted(answer for _, answer in generated)


def test_special_tokens_inside_an_answer_are_shown_in_its_text(
    decoder: Decoder, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in distilled(decoder, tmp_path).open()]
    texts = [row["messages"][-1]["content"] for row in rows]
    assert any("<|user|>" in text for text in texts)
    assert not any(text.endswith("<|end|>") for text in texts)


def test_turns_are_joined_where_the_prompt_continues_and_apart_where_it_does_not() -> None:
    turns = [AnswerTokens([1], [2, 3]), AnswerTokens([1, 2, 3, 4], [5])]
    joined = SupervisedTokens([1, 2, 3, 4, 5], [False, True, True, False, True])
    assert join_turns(turns) == [joined]
    shortened = AnswerTokens([1, 3, 4], [6])
    alone = SupervisedTokens([1, 3, 4, 6], [False, False, False, True])
    assert join_turns([*turns, shortened]) == [joined, alone]


def test_ids_of_another_tokenizer_are_refused_and_its_text_is_not(
    decoder: Decoder, tmp_path: Path
) -> None:
    file = distilled(decoder, tmp_path, rows=2)
    other = byte_tokenizer(SPECIALS[::-1])
    assert vocabulary_of(other) != vocabulary_of(decoder.tokenizer)
    config = DataConfig("", max_length=64)
    with pytest.raises(UserError, match=r"row 1 of .*answers.jsonl are not those .* `token_ids`"):
        load_packed({str(file): 1.0}, other, config, seed=0)
    rows = [json.loads(line) for line in file.open()]
    text_only = [{k: v for k, v in row.items() if k != "token_ids"} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in text_only))
    assert len(load_packed({str(file): 1.0}, other, config, seed=0).sequences) == 2


@pytest.mark.parametrize("spoilt", [[1, -2], ["a"], "abc", None, [True]])
def test_ids_that_are_no_ids_name_the_line(tmp_path: Path, spoilt: object) -> None:
    row = {"prompt": "a", "token_ids": [{"prompt": [1], "answer": spoilt}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"a.jsonl, line 1: `answer` in `token_ids` must be"):
        read_conversations(tmp_path / "a.jsonl")


def test_a_foreign_column_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "token_ids": [3, 4]}))
    assert read_conversations(tmp_path / "a.jsonl")[0].tokens is None


def test_ids_beyond_the_vocabulary_cannot_be_claimed(decoder: Decoder, tmp_path: Path) -> None:
    """Ids are of the tokenizer's own vocabulary, so a row that was edited is refused."""
    ids = [{"prompt": [5], "answer": [decoder.target.vocab_size]}]
    row = {"prompt": "a", "token_ids": ids, "vocabulary": vocabulary_of(decoder.tokenizer)}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    [conversation] = read_conversations(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"token id 260 in row 1 of .*a.jsonl"):
        supervised_sequences(decoder.tokenizer, conversation)
