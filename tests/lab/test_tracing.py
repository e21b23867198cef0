"""A trace tells the steps of `generate`: proposals, probabilities, what was accepted."""

import pytest
import torch
from tiny import END, random_prompts, tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.lab.tracing import trace

DRAFTERS = ["prompt-lookup", "draft-model", "own-layers", "medusa:tree", "eagle3:own",
            "parallel:own", "parallel:own+lookup"]  # fmt: skip
PROMPT = random_prompts(1)[0]
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "verifier": "match"},
    {"temperature": 0.7, "verifier": "rejection"},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            *(name, options), id=f"{name}-{options.get('verifier', 'greedy')}",
            marks=() if options is OPTIONS[0] or name == "medusa:tree" else pytest.mark.thorough,
        )
        for name in DRAFTERS
        for options in OPTIONS
    ],
)  # fmt: skip
def test_a_trace_tells_the_steps_of_generate(make_drafter, target, name, options) -> None:
    decoder = Decoder(target, make_drafter(name, target))
    options = {**options, "max_new_tokens": 24, "seed": 3}
    traced, result = trace(decoder, PROMPT, **options), decoder.generate(PROMPT, **options)
    assert traced.prompt == PROMPT
    assert traced.result.sequences == result.sequences
    assert [len(step.path) for step in traced.steps] == result.stats.accept_lengths[0]
    committed = [result.sequences[0][0]]
    for step in traced.steps:
        assert step.nodes[0].token == committed[-1]
        committed += [*(step.nodes[index].token for index in step.path[1:]), step.bonus]
    assert committed[: len(result.sequences[0])] == result.sequences[0]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "match", "rejection"])
def test_probabilities_are_the_targets_after_each_parent(make_drafter, target, options) -> None:
    decoder = Decoder(target, make_drafter("draft-model", target))
    traced = trace(decoder, PROMPT, max_new_tokens=8, seed=1, **options)
    text = [*PROMPT, traced.result.sequences[0][0]]
    temperature, top_k = options["temperature"], options.get("top_k", 0)
    for step in traced.steps:
        for node in step.nodes[1:]:
            before = [*text, *(step.nodes[i].token for i in ancestors(step.nodes, node))]
            logits = target.model(torch.tensor([before])).logits[0, -1].float()
            logits = logits / (temperature or 1)
            if top_k:
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            expected = float(logits.softmax(-1)[node.token])
            assert node.target_prob == pytest.approx(expected, rel=1e-3, abs=1e-5)
            drawn = options.get("verifier") == "rejection"
            assert (node.draft_prob is not None) == drawn
            assert node.draft_prob is None or 0 < node.draft_prob <= 1
        text += [*(step.nodes[i].token for i in step.path[1:]), step.bonus]


def ancestors(nodes, node) -> list[int]:
    """Indices of the nodes between the root and a node."""
    above = []
    while node.parent > 0:
        above.insert(0, node.parent)
        node = nodes[node.parent]
    return above


def test_the_time_of_a_step_is_split_among_its_phases(make_drafter, target) -> None:
    traced = trace(Decoder(target, make_drafter("medusa:tree", target)), PROMPT, max_new_tokens=8)
    for phase in ("draft", "verify", "accept", "commit"):
        spent = sum(step.seconds[phase] for step in traced.steps)
        assert spent == pytest.approx(traced.result.stats.seconds[phase])
        assert spent > 0


def test_plain_decoding_has_trees_of_a_root(target) -> None:
    traced = trace(Decoder(target), PROMPT, max_new_tokens=5)
    assert [len(step.nodes) for step in traced.steps] == [1] * 4
    assert traced.rule == "greedy"


def test_one_prompt_is_traced_and_no_batch(target) -> None:
    with pytest.raises(UserError, match="one prompt"):
        trace(Decoder(target), [PROMPT, PROMPT], max_new_tokens=5)


def test_an_end_token_in_a_draft_ends_the_trace(make_drafter) -> None:
    target = Target(tiny_llama(eos_token_id=END))
    decoder = Decoder(target, make_drafter("prompt-lookup", target))
    for prompt in random_prompts(12):
        traced = trace(decoder, prompt, max_new_tokens=40)
        assert traced.result.sequences == decoder.generate(prompt, max_new_tokens=40).sequences
