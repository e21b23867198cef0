"""`drafthead data index`."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer

from drafthead.core.target.loading import vocabulary_of
from drafthead.infer.drafters.store_lookup import load_table
from drafthead.lab.reports.index import answers
from drafthead.train.data.sequences import TokenSequence

PROMPTS = 200  # of which some four are left out, to measure on


@pytest.fixture
def run(tmp_path, drafthead):
    """Run the verb on conversations; returns status, output and errors."""
    byte_tokenizer().save_pretrained(tmp_path / "target")

    def run(prompts: int, output: Path, *more: str) -> tuple[int, str, str]:
        """Two answers to each prompt."""
        with (tmp_path / "data.jsonl").open("w") as file:
            for number in range(2 * prompts):
                question = {"role": "user", "content": f"count {number // 2}"}
                answer = {"role": "assistant", "content": "abcd " * (2 + number % 7)}
                file.write(json.dumps({"messages": [question, answer]}) + "\n")
        words = ["--data", f"{tmp_path}/data.jsonl", "--target", f"{tmp_path}/target"]
        return drafthead("data", "index", *words, "--output", output, *more)

    return run


def test_ngrams_are_counted_and_measured(run, tmp_path: Path) -> None:
    status, out, _ = run(PROMPTS, tmp_path / "store", "--ngrams", "3")
    assert status == 0 and "n-grams of up to 3" in out
    counted = int(re.search(r"tokens of (\d+) answers", out)[1])
    measured = int(re.search(r"on (\d+) answers not in the table", out)[1])
    assert counted + measured == 2 * PROMPTS, "few are left out"
    assert 0 < measured < 20 and measured % 2 == 0, "both answers to a prompt"
    table = load_table(tmp_path / "store", vocabulary_of(byte_tokenizer()))
    assert len(table.contexts) == 3
    past = byte_tokenizer().encode("d ab", add_special_tokens=False)
    assert byte_tokenizer().decode(next(iter(table.distribution(past)))) == "c"


def test_a_corpus_for_sglang_holds_the_indexed_answers(run, tmp_path: Path) -> None:
    status, _, _ = run(3, tmp_path / "store", "--corpus", str(tmp_path / "corpus.jsonl"))
    texts = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert status == 0 and len(texts) == 6
    tokenizer = byte_tokenizer()
    for number, text in enumerate(texts):  # as SGLang encodes them
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids[:-1]) == "abcd " * (2 + number % 7)
        assert ids[-1] == tokenizer.eos_token_id
    status, _, errors = run(3, tmp_path / "other", "--corpus", str(tmp_path / "corpus.jsonl"))
    assert status != 0 and "corpus.jsonl is there already: choose another --corpus" in errors
    assert not (tmp_path / "other").exists()


def test_prompt_lookup_alone_stands_beside_the_table(run, tmp_path: Path) -> None:
    """It has to see a word before it can repeat it; the table knows the word."""
    _, out, _ = run(PROMPTS, tmp_path / "store")
    (row,) = re.findall(r"^ +16 +([0-9.]+) +([0-9.]+) +$", out, re.MULTILINE)
    alone, with_table = map(float, row)
    assert 1.2 < alone < with_table


@pytest.mark.parametrize(("order", "bound"), [("1", "at least 2"), ("6", "at most 5")])
def test_ngrams_of_other_lengths_are_refused(run, tmp_path: Path, order: str, bound: str) -> None:
    status, _, err = run(3, tmp_path / "store", "--ngrams", order)
    assert status == 2 and f"--ngrams must be {bound}, got {order}" in err


def test_few_answers_are_indexed_without_a_measurement(run, tmp_path: Path) -> None:
    status, out, _ = run(2, tmp_path / "store")
    assert status == 0 and "was not measured" in out


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    status, _, err = run(3, tmp_path / "full")
    assert status == 2 and "is not empty: choose another --output" in err


def test_answers_are_the_supervised_runs() -> None:
    ids = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)
    sequence = TokenSequence(ids, torch.tensor([False, True, True, False, True]))
    assert list(answers(sequence)) == [[6, 7], [9]]
