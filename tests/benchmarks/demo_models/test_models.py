"""The models in assets/ are small, speak, and decode together."""

import json
from pathlib import Path

import pytest
from hidden_answers import generated

from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.answers.results import repeated_ngram_share
from drafthead.infer.drafters.draft_model import DraftModel

ASSETS = Path(__file__).parents[3] / "assets"


@pytest.fixture(scope="module")
def demo_target() -> Target:
    """In float32, where greedy equality is exact."""
    return load_decoder_only(ASSETS / "demo_target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    """Held-out prompts."""
    lines = (ASSETS / "demo_prompts" / "test.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines[:25]]


def test_greedy_answers_with_the_draft_model_equal_those_of_transformers(
    demo_target, prompts
) -> None:
    small = load_decoder_only(ASSETS / "demo_draft", dtype="float32", device="cpu")
    decoder = Decoder(demo_target, DraftModel(small, demo_target, depth=4))
    answers = decoder.generate(prompts[:8], max_new_tokens=48)
    assert answers.stats.tau > 1.5 and any(answers.finished)
    for prompt, answer in zip(prompts, answers.sequences, strict=False):
        ids = demo_target.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        assert answer == generated(demo_target.model, ids, 48)


def test_greedy_answers_are_no_loops(demo_target, prompts) -> None:
    result = Decoder(demo_target).generate(prompts, max_new_tokens=128)
    assert repeated_ngram_share(result.sequences) < 0.2


def test_models_are_small_and_say_where_they_come_from() -> None:
    weights = list(ASSETS.rglob("*.safetensors"))
    assert {path.parent.name for path in weights} >= {"demo_target", "demo_draft"}
    assert sum(path.stat().st_size for path in weights) < 60e6
    for name in ("demo_target", "demo_draft"):
        card = (ASSETS / name / "README.md").read_text()
        assert all(word in card for word in ("license", "tokens", "loss", "build_models"))
