"""Conversations longer than a row are split at turns: every answer is learnt once, none is lost."""

import random
from collections import Counter
from dataclasses import replace
from datetime import datetime

import pytest
from tiny import byte_tokenizer
from transformers.utils import chat_template_utils

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.train.data.conversations import AnswerTokens, Conversation, StoredTokens
from drafthead.train.data.fitted_rows import Reading, fitted_rows, turn_starts
from drafthead.train.data.left_out import LeftOut
from drafthead.train.data.row_forms import Message
from drafthead.train.data.sequences import SupervisedTokens
from drafthead.train.data.supervision import Rendering

CHAT = byte_tokenizer()
# Shows no answer but the last, as templates do that drop earlier reasoning.
FORGETFUL = byte_tokenizer()
FORGETFUL.chat_template = (
    "{% for message in messages %}{% if message.role != 'assistant' or loop.last %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Writes the date twice, as those of Llama 3.2, SmolLM3 and Granite do once.
DATED = "Of {{ strftime_now('%d %B %Y') }} ({{ strftime_now('%y') }})\n{% set day = "
DATED += f"strftime_now('%d %B %Y') %}}{CHAT.chat_template}{{{{ day[:0] }}}}"
SYSTEM: Message = {"role": "system", "content": "S"}


def dialogue(*turns: tuple[str, str], system: bool = False) -> Conversation:
    """A conversation of questions with their answers."""
    messages: list[Message] = [SYSTEM] if system else []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return Conversation("a", messages, "f.jsonl:1")


def distilled(conversation: Conversation, tokenizer=CHAT) -> Conversation:
    """A conversation with ids that a target generated: capitals for the text's small letters."""
    answers = []
    for i, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            prompt = Rendering(tokenizer, "here").ids(conversation.messages[:i], True)
            ids = tokenizer(message["content"].upper() + "<|end|>")["input_ids"]
            answers.append(AnswerTokens(prompt, ids))
    return replace(conversation, tokens=StoredTokens(tuple(answers), vocabulary_of(tokenizer)))


def fitted(
    conversation: Conversation, max_length: int, tokenizer=CHAT
) -> tuple[list[SupervisedTokens], list[str]]:
    """The sequences, and what a user is told."""
    left_out = LeftOut(rows=1)
    rows = list(
        fitted_rows(tokenizer, [conversation], Reading("", None, max_length, None), left_out)
    )
    return rows, left_out.sentences(max_length)


def shown(row: SupervisedTokens) -> str:
    """The text without marks of roles; what is learnt is in brackets, `.` ends a message."""
    text, learning = "", False
    for token, learnt in zip(row.input_ids, row.mask, strict=True):
        text += "[" * (learnt and not learning) + "]" * (learning and not learnt)
        text += {"<|end|>": ".", "<|user|>": "", "<|assistant|>": ""}.get(
            CHAT.convert_ids_to_tokens(token), CHAT.decode([token])
        )
        learning = learnt
    return text + "]" * learning


def learnt_ids(row: SupervisedTokens) -> list[int]:
    return [token for token, learnt in zip(row.input_ids, row.mask, strict=True) if learnt]


FIVE = [("1", "a"), ("2", "b"), ("3", "c"), ("4", "d"), ("5", "e")]  # 6 tokens a turn


def test_the_first_sequence_is_filled_and_later_ones_begin_with_context() -> None:
    rows, told = fitted(dialogue(*FIVE), 17)
    assert [shown(row) for row in rows] == [
        "1.[a.]2.[b.]",
        "2.b.3.[c.]",
        "3.c.4.[d.]",
        "4.d.5.[e.]",
    ]
    assert told == ["1 of 1 rows are longer than 17 tokens and are split at turns into 4 sequences"]


def test_as_many_turns_are_learnt_as_fill_half_of_a_sequence() -> None:
    rows, _ = fitted(dialogue(*FIVE), 24)
    assert [shown(row) for row in rows] == ["1.[a.]2.[b.]3.[c.]4.[d.]", "2.b.3.c.4.d.5.[e.]"]
    rows, _ = fitted(dialogue(*FIVE, *FIVE), 24)
    assert [shown(row) for row in rows[1:]] == [
        "3.c.4.d.5.[e.]1.[a.]",
        "5.e.1.a.2.[b.]3.[c.]",
        "2.b.3.c.4.[d.]5.[e.]",
    ]


def test_every_sequence_begins_with_the_system_message() -> None:
    rows, _ = fitted(dialogue(*FIVE[:3], system=True), 24)  # 12 tokens of which are that message
    assert [shown(row) for row in rows] == ["<|system|>S.1.[a.]2.[b.]", "<|system|>S.2.b.3.[c.]"]


def test_a_conversation_that_fits_is_left_whole() -> None:
    rows, told = fitted(dialogue(*FIVE), 30)
    assert [shown(row) for row in rows] == ["1.[a.]2.[b.]3.[c.]4.[d.]5.[e.]"]
    assert told == []


def test_only_a_turn_that_is_longer_alone_is_cut() -> None:
    rows, told = fitted(dialogue(("1", "a"), ("2", "b" * 40), ("3" * 40, "c"), ("4", "d")), 20)
    assert [shown(row) for row in rows] == ["1.[a.]", f"2.[{'b' * 16}]", "4.[d.]"]
    assert told == [
        "1 of 1 rows are longer than 20 tokens and are split at turns into 4 sequences",
        "2 sequences that cannot be split are cut to 20 tokens, 1 of them dropped because less "
        "than two tokens of an answer were left (the first is row 1 of f.jsonl)",
    ]


def test_nothing_to_learn_within_the_length_is_an_error() -> None:
    with pytest.raises(UserError, match="within 2 tokens"):
        fitted(dialogue(*FIVE), 2)


def test_context_is_text_and_what_is_learnt_are_the_stored_ids() -> None:
    rows, _ = fitted(distilled(dialogue(*FIVE[:3])), 17)
    # The second turn's prompt shows the first answer as text, which the ids before do not.
    assert [shown(row) for row in rows] == ["1.[A.]", "1.a.2.[B.]", "2.b.3.[C.]"]


def test_rows_whose_prompts_the_template_does_not_make_are_cut_and_counted() -> None:
    conversation = distilled(dialogue(*FIVE[:3]))
    assert conversation.tokens is not None
    first, *others = conversation.tokens.answers
    marked = [replace(first, prompt=[5, *first.prompt]), *others]
    other = replace(conversation, tokens=replace(conversation.tokens, answers=tuple(marked)))
    rows, told = fitted(other, 17)
    assert [shown(row) for row in rows[1:]] == ["1.a.2.[B.]"]
    assert "1 of 1 rows are longer than 17 tokens and cannot be split" in told[0]
    assert "1 of them dropped" in told[1], "of its answer one token is left, which teaches nothing"


def test_stored_ids_are_learnt_when_the_template_refuses_their_messages() -> None:
    refusing = byte_tokenizer()
    refusing.chat_template = "{{ raise_exception('no') }}"
    rows, told = fitted(distilled(dialogue(*FIVE[:3])), 20, refusing)
    assert [shown(row) for row in rows] == ["1.[A.]", "1.a.2.[B.]", "1.a.2.b.3.[C.]"]
    assert told == []
    rows, told = fitted(distilled(dialogue(*FIVE[:3])), 17, refusing)
    assert len(rows) == 2 and "cannot be split" in told[0]


def test_a_turn_is_a_question_and_all_that_answers_it() -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "assistant", "user"]
    assert turn_starts([{"role": role, "content": ""} for role in roles]) == [1, 3, 7]
    roles = ["assistant", "user", "user", "assistant", "system", "user", "assistant"]
    assert turn_starts([{"role": role, "content": ""} for role in roles]) == [0, 1, 4, 7]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stored", [False, True])
def test_every_answer_token_is_learnt_once(seed: int, stored: bool) -> None:
    """Random conversations, with and without a system message, in rows of random length."""
    chance = random.Random(seed)
    turns = []
    for number in range(chance.randint(2, 12)):
        turns.append((f"q{number}" * chance.randint(1, 5), f"a{number}," * chance.randint(1, 6)))
    conversation = dialogue(*turns, system=chance.random() < 0.5)
    conversation = distilled(conversation) if stored else conversation
    # The longest turn has 12 + 25 + 29 tokens with the system message.
    rows, _ = fitted(conversation, max_length := chance.randint(66, 150))
    answers = [f"{answer.upper() if stored else answer}<|end|>" for _, answer in turns]
    learnt = Counter(i for row in rows for i in learnt_ids(row))
    assert learnt == Counter(i for answer in answers for i in CHAT(answer)["input_ids"])
    beginning = "<|system|>S." if conversation.messages[0] == SYSTEM else "q"
    for row in rows:
        assert len(row.input_ids) <= max_length
        assert shown(row).startswith(beginning)
    together = [CHAT.decode(learnt_ids(row)) for row in rows]
    assert "".join(together) == "".join(answers)


def test_a_template_that_forgets_answers_learns_each_where_it_is_the_last() -> None:
    rows, _ = fitted(distilled(dialogue(*FIVE), FORGETFUL), 12, FORGETFUL)
    assert [shown(row) for row in rows] == [
        "1.[A.]",
        "1.2.[B.]",
        "1.2.3.[C.]",
        "2.3.4.[D.]",
        "3.4.5.[E.]",
    ]


def set_clock(monkeypatch: pytest.MonkeyPatch, day: datetime) -> None:
    """Have chat templates write this day."""
    clock = type("Clock", (), {"now": staticmethod(lambda: day)})
    monkeypatch.setattr(chat_template_utils, "datetime", clock)


@pytest.mark.parametrize("day", [datetime(2026, 1, 9), datetime(2025, 12, 31)])
def test_rows_of_another_day_are_split_with_their_own_date(day: datetime, monkeypatch) -> None:
    today = byte_tokenizer()
    today.chat_template = DATED
    set_clock(monkeypatch, day)
    conversation = distilled(dialogue(*FIVE), today)
    wanted, _ = fitted(conversation, 48, today)
    set_clock(monkeypatch, datetime(2026, 11, 27))
    rows, told = fitted(conversation, 48, today)
    assert rows == wanted and len(rows) > 2
    assert all(day.strftime("Of %d %B %Y (%y)") in CHAT.decode(row.input_ids) for row in rows)
    assert told[0].endswith(f"are split at turns into {len(rows)} sequences")


def test_a_date_does_not_hide_another_template(monkeypatch) -> None:
    today = byte_tokenizer()
    today.chat_template = DATED
    set_clock(monkeypatch, datetime(2026, 1, 9))
    conversation = distilled(dialogue(*FIVE), today)
    today.chat_template = DATED.replace("Of ", "On ")
    assert "cannot be split" in fitted(conversation, 48, today)[1][0]
