"""Reading conversations of every shape, and the loss mask under real-world chat templates."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from typer import Typer
from typer.testing import CliRunner

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import tell_of_base_model
from drafthead.core.target.loading import vocabulary_of
from drafthead.infer.request.prompts import encode
from drafthead.lab.reports.data_set import runs
from drafthead.scripts.data import inspect_data
from drafthead.scripts.options import with_groups
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.row_forms import Message
from drafthead.train.data.sequences import SupervisedTokens
from drafthead.train.data.supervision import Rendering, supervise


def supervised(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], where: str = "the conversation"
) -> SupervisedTokens:
    return supervise(Rendering(tokenizer, where), messages)


SPECIALS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>", "<|EOS|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|endoftext|>", "[INST]", "[/INST]", "<|start|>", "<|channel|>", "<|message|>"),
    "<|return|>",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (  # trims contents, folds the system text into the first user message
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\\n' + messages[0].content + "
    "'\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + "
    "m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (  # refuses a system message, renames the assistant
    "<bos>{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # writes the system text into the last user message
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
    "{% endif %}{% set last = namespace(user=0) %}{% for m in turns %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}[INST] "
    "{{ (system if loop.index0 == last.user else '') + m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN_3 = (  # writes thoughts only after the last user message, an empty thought if there is none
    "{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK_R1 = (  # asks for a thought, then shows no thought
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|EOS|>"
    "{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI_3 = (  # ends a finished conversation with another token
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
HARMONY = (  # the last answer ends with another token than earlier ones
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
VICUNA = (  # no control token in front of the answer
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """What of a two-turn conversation a template lets the assistant emit."""

    template: str
    answers: tuple[str, ...]


CASES = {
    "chatml": Case(CHATML, ("It is four.<|im_end|>", "Yes, twice.<|im_end|>")),
    "llama-2": Case(LLAMA_2, (" It is four. </s>", " Yes, twice. </s>")),
    "llama-3": Case(LLAMA_3, ("It is four.<|eot_id|>", "Yes, twice.<|eot_id|>")),
    "gemma": Case(GEMMA, ("It is four.<end_of_turn>", "Yes, twice.<end_of_turn>")),
    "mistral": Case(MISTRAL, (" It is four.</s>", " Yes, twice.</s>")),
    "qwen-3": Case(QWEN_3, ("<think>\n\n</think>\n\nYes, twice.<|im_end|>",)),
    "deepseek-r1": Case(DEEPSEEK_R1, ("It is four.<|EOS|>", "Yes, twice.<|EOS|>")),
    "zephyr": Case(ZEPHYR, ("It is four.</s>", "Yes, twice.</s>")),
    "phi-3": Case(PHI_3, ("It is four.<|end|>", "Yes, twice.<|end|>")),
    "harmony": Case(
        HARMONY,
        (
            "<|channel|>final<|message|>It is four.",
            "<|channel|>final<|message|>Yes, twice.<|return|>",
        ),
    ),
    "vicuna": Case(VICUNA, (" It is four.</s>", " Yes, twice.</s>")),
}
SYSTEM: Message = {"role": "system", "content": "Be brief. It is four."}
TWO_TURNS: list[Message] = [
    {"role": "user", "content": "What is two and two? It is four."},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "Sure? Yes, twice."},
    {"role": "assistant", "content": "Yes, twice."},
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """Byte-level BPE that adds <s> by itself and reports offsets without leading spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "What is two and two? It is four. Sure? Yes, twice. USER ASSISTANT: assistant model"
    tokenizer.train_from_iterator([words, words], trainer)
    begin = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return tokenizer


def with_template(bpe: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def supervised_pieces(tokenizer: PreTrainedTokenizerFast, marked: SupervisedTokens) -> list[str]:
    return [
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids, kept in runs(marked, token_by_token=False)
        if kept
    ]


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------- marking


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_answers_and_their_ends_are_supervised(bpe: Tokenizer, name: str) -> None:
    """And the ids are those of the chat template; llama-2 has one <s> a user turn."""
    tokenizer = with_template(bpe, CASES[name].template)
    marked = supervised(tokenizer, TWO_TURNS)
    assert supervised_pieces(tokenizer, marked) == list(CASES[name].answers)
    assert marked.input_ids == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)
    assert len(marked.mask) == len(marked.input_ids)
    assert marked.input_ids.count(tokenizer.bos_token_id) <= 2


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gemma", "mistral"}))
def test_a_system_message_changes_nothing_about_the_answers(bpe: Tokenizer, name: str) -> None:
    tokenizer = with_template(bpe, CASES[name].template)
    marked = supervised(tokenizer, [SYSTEM, *TWO_TURNS])
    assert supervised_pieces(tokenizer, marked) == list(CASES[name].answers)


def test_a_template_that_moves_the_system_text_keeps_the_last_answer(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, MISTRAL)
    marked = supervised(tokenizer, [SYSTEM, *TWO_TURNS])
    assert supervised_pieces(tokenizer, marked) == [" Yes, twice.</s>"]


def test_thoughts_that_the_template_shows_are_supervised(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, QWEN_3)
    thought: Message = {**TWO_TURNS[1], "reasoning_content": "two"}
    marked = supervised(tokenizer, [TWO_TURNS[0], thought])
    assert supervised_pieces(tokenizer, marked) == [
        "<think>\ntwo\n</think>\n\nIt is four.<|im_end|>"
    ]


def test_an_answer_cut_before_its_end_does_not_teach_to_stop(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, CHATML)
    cut: Message = {**TWO_TURNS[1], "finished": False}
    marked = supervised(tokenizer, [TWO_TURNS[0], cut, *TWO_TURNS[2:]])
    assert supervised_pieces(tokenizer, marked) == ["It is four.", "Yes, twice.<|im_end|>"]


def test_an_empty_answer_supervises_its_end(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, LLAMA_3)
    marked = supervised(tokenizer, [TWO_TURNS[0], {"role": "assistant", "content": ""}])
    assert supervised_pieces(tokenizer, marked) == ["<|eot_id|>"]


def test_a_token_that_holds_prompt_and_answer_is_not_supervised(bpe: Tokenizer) -> None:
    """The prompt ends with a space, which the tokenizer merges with the answer's first word."""
    tokenizer = with_template(bpe, VICUNA.replace("ASSISTANT:{%", "ASSISTANT: {%"))
    marked = supervised(tokenizer, TWO_TURNS[:2])
    assert supervised_pieces(tokenizer, marked) == [" is four.</s>"]


def test_a_token_that_holds_answer_and_template_is_not_supervised(bpe: Tokenizer) -> None:
    """The template joins messages by "o ", which makes the token "two" of the answer's "tw"."""
    joining = VICUNA.replace("eos_token if", "('' if loop.last else 'o ') if")
    tokenizer = with_template(bpe, joining)
    answer: Message = {"role": "assistant", "content": "four tw"}
    marked = supervised(tokenizer, [TWO_TURNS[0], answer, TWO_TURNS[2], TWO_TURNS[1]])
    assert "two" in [tokenizer.decode(i).strip() for i in marked.input_ids]
    assert supervised_pieces(tokenizer, marked)[0] == " four"


def test_an_earlier_answer_that_is_shortened_later_is_not_supervised(bpe: Tokenizer) -> None:
    shortening = CHATML.replace(
        "m.content }}", "m.content if loop.last or m.role == 'user' else m.content[:6] }}"
    )
    tokenizer = with_template(bpe, shortening)
    assert supervised_pieces(tokenizer, supervised(tokenizer, TWO_TURNS)) == [
        "Yes, twice.<|im_end|>"
    ]


def test_a_prompt_unlike_the_full_text_supervises_nothing(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, "{% if add_generation_prompt %}Think. {% endif %}" + CHATML)
    with pytest.raises(UserError, match="0 supervised tokens"):
        supervised(tokenizer, TWO_TURNS)


def test_characters_of_several_tokens_stay_whole(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, CHATML)
    answer: Message = {"role": "assistant", "content": "日本 🎉"}
    marked = supervised(tokenizer, [{"role": "user", "content": "é🎉"}, answer])
    kept = [i for i, k in zip(marked.input_ids, marked.mask, strict=True) if k]
    assert kept == tokenizer("日本 🎉<|im_end|>", add_special_tokens=False)["input_ids"]


def test_the_prompt_is_encoded_without_a_second_bos(bpe: Tokenizer) -> None:
    tokenizer = with_template(bpe, MISTRAL)
    ids = Rendering(tokenizer, "the prompt").ids(TWO_TURNS[:1], True)
    assert ids == tokenizer.apply_chat_template(
        TWO_TURNS[:1], add_generation_prompt=True, return_dict=False
    )
    assert ids.count(tokenizer.bos_token_id) == 1


def test_answers_of_a_base_model_continue_their_prompts(bpe: Tokenizer, caplog) -> None:
    """The prompt has the tokens that decoding gives it, and an answer ends the text."""
    tell_of_base_model.cache_clear()
    tokenizer = with_template(bpe, None)
    marked = supervised(tokenizer, TWO_TURNS[:2])
    asked, answered = (turn["content"] for turn in TWO_TURNS[:2])
    assert tokenizer.decode(marked.input_ids) == f"<s>{asked}{answered}</s>"
    assert supervised_pieces(tokenizer, marked) == ["It is four.</s>"]
    assert [Rendering(tokenizer, "the prompt").ids(TWO_TURNS[:1], True)] == encode(asked, tokenizer)
    assert caplog.messages == [
        "this tokenizer has no chat template: prompts are texts that answers continue"
    ]


def test_a_refused_system_role_says_so(bpe: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"row 3 of f.jsonl: .*System role not supported"):
        supervised(with_template(bpe, GEMMA), [SYSTEM, *TWO_TURNS], "row 3 of f.jsonl")


def test_roles_that_must_alternate_say_so(bpe: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"roles user, user .*must alternate"):
        supervised(with_template(bpe, LLAMA_2), [TWO_TURNS[0], TWO_TURNS[0]])


def test_a_template_without_answers_is_refused(bpe: Tokenizer) -> None:
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="0 supervised tokens in row 17 of FILE: the template"):
        supervised(with_template(bpe, silent), TWO_TURNS, "row 17 of FILE")


def test_a_conversation_without_answers_is_refused(bpe: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"0 supervised tokens in .*no assistant answers"):
        supervised(with_template(bpe, CHATML), TWO_TURNS[:1])


# ------------------------------------------------------------------------------------- reading

USER_A: Message = {"role": "user", "content": "a"}
ASSISTANT_B: Message = {"role": "assistant", "content": "b"}
SHAPES: dict[str, tuple[dict[str, object], list[Message]]] = {
    "messages": ({"messages": [USER_A, ASSISTANT_B]}, [USER_A, ASSISTANT_B]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [USER_A, ASSISTANT_B],
    ),
    "turns": ({"turns": ["a", "c"]}, [USER_A, {"role": "user", "content": "c"}]),
    "question and answer": ({"question": "a", "answer": "b"}, [USER_A, ASSISTANT_B]),
    "prompt": ({"prompt": "a"}, [USER_A]),
    "text": ({"text": "a"}, [USER_A]),
    "instruction and input": (
        {"instruction": "a", "input": "c", "output": "b"},
        [{"role": "user", "content": "a\n\nc"}, ASSISTANT_B],
    ),
    "prompt and completion": (
        {"prompt": [USER_A], "completion": [ASSISTANT_B]},
        [USER_A, ASSISTANT_B],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        [USER_A],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_shape_is_read_from_every_file_type(tmp_path: Path, shape: str, suffix: str) -> None:
    values, expected = SHAPES[shape]
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        Dataset.from_list([values]).to_parquet(path)
    else:
        path.write_text(json.dumps([values] if suffix == ".json" else values), encoding="utf-8")
    [conversation] = read_conversations(path)
    assert conversation == Conversation(f"data{suffix}:1", expected, f"{path}:1")


def test_places_are_line_numbers_and_blank_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"id": 7, "prompt": "b"}\n', encoding="utf-8")
    rows = read_conversations(str(path))
    assert [(row.id, row.where) for row in rows] == [
        ("data.jsonl:1", f"row 1 of {path}"),
        ("7", f"row 3 of {path}"),
    ]


def test_repeated_ids_become_unique(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"id": "x", "prompt": "a"}] * 3)
    assert [row.id for row in read_conversations(path)] == ["x", "x#2", "x#3"]


def test_a_named_prompt_column_comes_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": "a", "task": "b"}])
    assert read_conversations(path, prompt_column="task")[0].messages[0]["content"] == "b"


def test_the_limit_stops_reading_before_a_later_fault(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": "a"}, {"prompt": "b"}, 3])
    assert len(read_conversations(path, limit=2)) == 2


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "2.jsonl", [{"prompt": "b"}])
    write_rows(tmp_path / "1.jsonl", [{"prompt": "a"}])
    (tmp_path / "README.md").write_text("not data")
    assert [row.id for row in read_conversations(tmp_path)] == ["1.jsonl:1", "2.jsonl:1"]


def test_a_saved_data_set_is_read(tmp_path: Path) -> None:
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    assert read_conversations(tmp_path / "saved")[0].messages == [USER_A]


HEADER = "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\ntext"
READ_OTHERWISE = {
    "dataset_info.json": '{"mine": {"file_name": "a.jsonl"}}',  # LLaMA-Factory's
    "dataset_infos.json": "{}",
    "dataset_dict.json": '{"mine": 1}',
    "state.json": '{"epoch": 1}',  # transformers'
    "README.md": HEADER,
    "data-00000-of-00001.arrow": "",
}


@pytest.mark.parametrize("name", READ_OTHERWISE)
def test_a_folder_that_others_read_otherwise_is_refused_and_the_file_named(
    tmp_path: Path, name: str
) -> None:
    write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / name).write_text(READ_OTHERWISE[name])
    with pytest.raises(UserError, match=f"{re.escape(name)} .*name a file of rows"):
        read_conversations(tmp_path)


@pytest.mark.parametrize("damage", ["state.json", "data-00000-of-00001.arrow"])
def test_a_saved_data_set_that_is_not_whole_is_refused(tmp_path: Path, damage: str) -> None:
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path)
    (tmp_path / damage).write_text("{}")
    with pytest.raises(UserError, match=r"cannot load .*dataset_info.json describes .*of rows"):
        read_conversations(tmp_path)
    (tmp_path / damage).unlink()
    with pytest.raises(UserError, match=r"dataset_info.json .* name a file of rows"):
        read_conversations(tmp_path)


FAULTS = {
    "broken JSON": ('\n{"prompt": \n', r"data.jsonl, line 2: not valid JSON \("),
    "no object": ("[1]\n", "data.jsonl, line 1: expected a JSON object, found list"),
    "empty file": ("", "data.jsonl is empty"),
    "only blank lines": ("\n\n", "data.jsonl holds no conversation"),
    "other columns": (
        '{"code": 1, "lang": 2}\n',
        "line 1: .*in `code`, `lang`; known columns are `messages`.*`question`",
    ),
    "unknown role": (
        '{"conversations": [{"from": "cat", "value": "a"}]}\n',
        "line 1: unknown role `cat`",
    ),
    "message of another shape": ('{"messages": [{"who": "me"}]}\n', "needs `role` and `content`"),
    "no text": ('{"messages": [{"role": "user", "content": 3}]}\n', "must be text, found 3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_file_and_line(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    path = tmp_path / "data.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_conversations(path)


def test_faults_of_files_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column `task`, but `prompt`"):
        read_conversations(write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}]), "task")
    with pytest.raises(UserError, match=r"missing.jsonl does not exist"):
        read_conversations(tmp_path / "missing.jsonl")
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"a.csv: only .jsonl"):
        read_conversations(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"a.parquet is not a readable Parquet file"):
        read_conversations(tmp_path / "a.parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(UserError, match=r"latin.jsonl is not UTF-8"):
        read_conversations(tmp_path / "latin.jsonl")
    (tmp_path / "a.json").write_text('[{"prompt": "a"},\n{]')
    with pytest.raises(UserError, match=r"a.json, line 2: not valid JSON"):
        read_conversations(tmp_path / "a.json")


# ------------------------------------------------------------------------------ the inspector


@pytest.fixture
def inspect(bpe: Tokenizer, tmp_path: Path):
    """Run `inspect-data` on rows with a saved ChatML tokenizer; returns what it prints."""
    with_template(bpe, CHATML).save_pretrained(tmp_path / "model")

    def run(rows: list[object], *options: str) -> str:
        path = write_rows(tmp_path / "data.jsonl", rows)
        app = Typer()
        app.command()(with_groups(inspect_data.main))
        arguments = ["--data", str(path), "--target", str(tmp_path / "model"), *options]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    return run


def test_piped_inspection_brackets_supervised_text(inspect) -> None:
    output = inspect([{"messages": TWO_TURNS}])
    assert "<|im_start|>assistant\n⟦It is four.<|im_end|>⟧" in output
    assert "\x1b[" not in output


def test_inspection_shows_the_ids_that_were_generated(inspect, bpe: Tokenizer) -> None:
    """Here the text of the answer is not what its ids say."""
    ids = {"prompt": [0, 2], "answer": [*bpe.encode("Sure").ids[1:], 3]}
    vocabulary = vocabulary_of(with_template(bpe, CHATML))
    output = inspect([{"messages": TWO_TURNS, "token_ids": [ids], "vocabulary": vocabulary}])
    assert "token ids as generated\n<s><|im_start|>⟦Sure<|im_end|>⟧" in output
    assert re.search(r"rows with the ids that the target generated\W+1", output)
    assert "It is four" not in output


def test_inspection_names_rows_without_supervised_tokens(inspect) -> None:
    output = inspect([{"messages": TWO_TURNS}, {"prompt": "[bold]a"}], "--row", "2")
    assert "[bold]a" in output
    assert "0 supervised tokens in row 2 of" in output
    assert "It is four" not in output


def test_inspection_shows_where_tokens_end(inspect) -> None:
    output = inspect([{"messages": TWO_TURNS}], "--show-tokens")
    assert "⟦.⟧|⟦<|im_end|>⟧|" in output


def test_inspection_of_a_missing_row_says_how_many_there_are(inspect) -> None:
    with pytest.raises(UserError, match="has 1 conversations, there is no row 5"):
        inspect([{"messages": TWO_TURNS}], "--row", "5")
