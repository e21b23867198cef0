"""The models in assets/ do what the README promises of them."""

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.sampling import SamplingConfig, probabilities
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import TreeShape
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.results import repeated_ngram_share

ASSETS = Path(__file__).parents[3] / "assets"
MAX_NEW = 48


@pytest.fixture(scope="module")
def demo_target() -> Target:
    """In float32, where greedy equality is exact."""
    return Target.from_pretrained(ASSETS / "demo_target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    """50 held-out prompts."""
    lines = (ASSETS / "demo_prompts" / "test.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines[:50]]


@pytest.fixture(scope="module")
def greedy_answers(demo_target, prompts) -> list[list[int]]:
    """What transformers' own greedy decoding says."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor(
            [
                demo_target.tokenizer.apply_chat_template(
                    prompt, add_generation_prompt=True, return_dict=False
                )
            ]
        )
        output = demo_target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW
        )
        answers.append(output[0, ids.shape[1] :].tolist())
    ended = sum(answer[-1] == demo_target.tokenizer.eos_token_id for answer in answers)
    assert ended >= 10, "answers must end inside the text"
    return answers


def drafter_of(name: str, target: Target, make_head):
    if name == "draft model":
        small = Target.from_pretrained(ASSETS / "demo_draft", dtype="float32", device="cpu")
        return DraftModel(small, target, depth=4)
    if name == "prompt lookup":
        return PromptLookup(depth=4)
    shape = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])
    return drafter_for(make_head("medusa", target), target, shape)


@pytest.mark.parametrize("batch", [1, 25])
@pytest.mark.parametrize("name", ["plain", "medusa", "draft model", "prompt lookup"])
def test_greedy_answers_equal_those_of_transformers(
    demo_target, prompts, greedy_answers, make_head, name, batch
) -> None:
    drafter = None if name == "plain" else drafter_of(name, demo_target, make_head)
    decoder = Decoder(demo_target, drafter)
    for start in range(0, 15 if batch == 1 else len(prompts), batch):
        result = decoder.generate(prompts[start : start + batch], max_new_tokens=MAX_NEW)
        assert result.sequences == greedy_answers[start : start + batch]


def test_sampled_answers_follow_the_targets_law(demo_target, prompts, make_head) -> None:
    """Chi-square of each of the first three tokens given the others' most probable prefix.

    The prefix is forced by the prompt, so each place has an exact law to be compared with; the
    third token comes out of trees whose first step accepted drafts. False alarm 1e-5 a place.
    """
    decoder = Decoder(demo_target, drafter_of("medusa", demo_target, make_head))
    count, sampling = 400, SamplingConfig(temperature=0.8, top_p=0.95)
    shortest = min(prompts, key=lambda prompt: len(prompt[0]["content"]))
    ids = demo_target.tokenizer.apply_chat_template(
        shortest, add_generation_prompt=True, return_dict=False
    )
    drawn = decoder.generate([ids] * count, max_new_tokens=3, temperature=0.8, top_p=0.95)
    sequences = [row + [-1] * (3 - len(row)) for row in drawn.sequences]
    prefix: list[int] = []
    for place in range(3):
        following = [row[place] for row in sequences if row[:place] == prefix]
        assert len(following) > 60
        check_law(demo_target, ids + prefix, following, sampling)
        prefix.append(max(set(following), key=following.count))


def check_law(target: Target, ids: list[int], drawn: list[int], sampling: SamplingConfig) -> None:
    """Compare drawn tokens with the target's distribution behind `ids`."""
    spec = FeatureSpec(layers=(), last=False)
    logits = target.run(torch.tensor([ids]), torch.arange(len(ids))[None], None, spec).logits
    expected = probabilities(logits[0, -1], sampling).double() * len(drawn)
    observed = torch.bincount(torch.tensor(drawn), minlength=target.vocab_size).double()
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    cells = [(observed[common], expected[common]), (observed[~common], expected[~common])]
    seen = torch.cat([cells[0][0], cells[1][0].sum()[None]])
    wanted = torch.cat([cells[0][1], cells[1][1].sum()[None]])
    kept = wanted > 1e-3
    if kept.sum() > 1:
        scale = seen[kept].sum() / wanted[kept].sum()
        assert chisquare(seen[kept], wanted[kept] * scale).pvalue > 1e-5


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
