"""`drafthead compare --theory` from the command line: two GPT-2s, the demo pair, and bad input."""

import json
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.fixture
def theory(drafthead, tmp_path):
    """Run `drafthead compare --theory ...`; status, what it printed, and theory.json."""

    def run(*arguments: object) -> tuple[int, str, dict]:
        words = (*arguments, "--output", tmp_path / "out")
        status, out, err = drafthead("compare", "--theory", *words)
        file = tmp_path / "out" / "theory.json"
        return status, out + err, json.loads(file.read_text()) if file.exists() else {}

    return run


@pytest.fixture(scope="module")
def gpt2_pair(tmp_path_factory) -> Path:
    """A folder with a target and a smaller draft model, both GPT-2s, and with prompts."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None  # as GPT-2's own
    for name, layers, width in (("large", 3, 32), ("small", 1, 16)):
        torch.manual_seed(layers)
        config = GPT2Config(
            vocab_size=len(tokenizer), n_positions=128, n_embd=width, n_layer=layers, n_head=2,
            initializer_range=0.3, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        GPT2LMHeadModel(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    prompts = [{"prompt": text} for text in ("a b a b a b", "one two one", "xyz")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    return folder


def test_two_gpt2s_with_chains_of_four(theory, gpt2_pair) -> None:
    """The setting of teaching implementations: a small GPT-2 drafts 4 tokens for a large one."""
    status, printed, content = theory(
        "--target", gpt2_pair / "large", "--draft", gpt2_pair / "small",
        "--draft", "lookup", "--draft-tokens", 4, "--prompts", gpt2_pair / "prompts.jsonl",
        "--max-new-tokens", 16,
    )  # fmt: skip
    assert status == 0, printed
    rows = content["rows"]
    places = [(row["drafter"], row["temperature"]) for row in rows]
    assert places == [("model small", 0), ("lookup", 0), ("model small", 1), ("lookup", 1)]
    small = rows[0]
    assert small["rule"] == "greedy" and rows[2]["rule"] == "rejection"
    assert [row["length"] for row in small["lengths"]] == list(range(1, 17))
    assert 0 < small["operations_cost"] < 0.5 and rows[1]["operations_cost"] == 0
    # At temperature 0 both are the share of right guesses at the same places.
    assert small["by_depth"][0]["value"] == pytest.approx(small["chances_at_steps"])
    for row in rows:
        for share in (row["alpha"], row["chances"]):
            assert 0 <= share["low"] <= share["value"] <= share["high"] <= 1
    assert "alpha: drafted tokens that are accepted" in printed


@pytest.mark.thorough
def test_the_demo_pair_accepts_more_than_chance_and_is_reported(theory, tmp_path) -> None:
    status, printed, content = theory(
        "--target", ASSETS / "demo_target", "--draft", ASSETS / "demo_draft",
        "--prompts", ASSETS / "demo_prompts" / "validation.jsonl", "--limit", 2,
        "--max-new-tokens", 8, "--temperature", 1, "--dtype", "float32",
    )  # fmt: skip
    assert status == 0, printed
    (row,) = content["rows"]
    assert row["alpha"]["value"] > 0.2 and row["chances"]["value"] > 0.2
    assert row["operations_cost"] == pytest.approx(0.42, abs=0.05), "5.3 MB of weights for 12.5 MB"
    assert 0 < row["prediction"]["speedup"] < 17
    page = (tmp_path / "out" / "theory.md").read_text()
    assert "| model demo_draft | 1 | 4 |" in page and content["notes"][0] in page
    assert (tmp_path / "out" / "theory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "no drafter is given: name one with --draft"),
        (
            ["--draft", "lookup", "--limit", 1, "--max-new-tokens", 8],
            "intervals are taken over answers",
        ),
        (
            ["--draft", "lookup", "--draft-tokens", 17],
            "--draft-tokens must be from 1 to 16, got 17",
        ),
        (["--draft", "@small", "--draft", "@small"], "two drafters are called model small"),
    ],
)
def test_bad_input_is_one_sentence(theory, gpt2_pair, options, sentence) -> None:
    given = [str(option).replace("@", f"{gpt2_pair}/") for option in options]
    status, printed, content = theory(
        "--target", gpt2_pair / "large", "--prompts", gpt2_pair / "prompts.jsonl", *given
    )
    assert status == 2 and sentence in printed and not content
