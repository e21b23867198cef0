"""Which layers draft best: alpha is that of decoding, and a search finds planted layers."""

from pathlib import Path

import pytest
import torch
from tiny import random_prompts, tiny_llama

from drafthead.contrib.own_layers.own_layers import OwnLayers
from drafthead.heads.errors import UserError
from drafthead.heads.target.part import part_of
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.lab.own_layers.layer_acceptance import (
    POSITIONS,
    alpha_of,
    guessed_answers,
    places_of,
)
from drafthead.lab.own_layers.layer_plan import LayerPlan
from drafthead.lab.own_layers.layer_search import LayerSearch, LayerSet
from drafthead.scripts.plan_skip import carry_out, verdict
from drafthead.train.data.token_table import TokenSequence

LAYERS, USELESS, ENDLESS = 5, (1, 3), float("inf")


@pytest.fixture(scope="module")
def target() -> Target:
    """A target of five layers, of which two add hardly anything."""
    model = tiny_llama(0, num_hidden_layers=LAYERS)
    for number in USELESS:
        layer = model.model.layers[number]
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.data *= 1e-4
    return Target(model)


@pytest.fixture(scope="module")
def answers(target: Target) -> list[TokenSequence]:
    """The target's own greedy answers, which follow prompts of different lengths."""
    prompts = random_prompts(6)
    result = Decoder(target).generate(prompts, max_new_tokens=POSITIONS)
    return [
        TokenSequence(
            torch.tensor([*prompt, *new]), torch.tensor([False] * len(prompt) + [True] * len(new))
        )
        for prompt, new in zip(prompts, result.sequences, strict=True)
    ]


@pytest.fixture(scope="module")
def search(target: Target, answers: list[TokenSequence]) -> LayerSearch:
    return LayerSearch(target, *(guessed_answers(target, answers[first::2]) for first in (0, 1)))


def test_roots_are_before_supervised_tokens_and_evenly_spaced() -> None:
    supervised = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0]).bool()
    assert places_of(supervised, 2).tolist() == [2, 4]
    assert places_of(supervised, 4).tolist() == [2, 3, 4, 5]
    assert places_of(supervised, 8).tolist() == [2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("layers", [(0, 1), (0, 2, 4), (1, 3, 4)], ids=str)
def test_alpha_is_how_often_decoding_accepts_the_first_token(target, answers, layers) -> None:
    """Each position is decoded on its own; the first root is the prompt's, not an answer's."""
    decoder, some = Decoder(target, OwnLayers(target, layers, 1), Budget(2, 1)), answers[:2]
    (group,) = guessed_answers(target, some)
    for answer, found in zip(some, group.agreement(part_of(target, layers)), strict=True):
        ids, places = answer.input_ids.tolist(), places_of(answer.supervised).tolist()
        for place, right in [*zip(places, found.tolist(), strict=True)][1:]:
            # The pass over the prompt gives the root, and the only step drafts after it.
            result = decoder.generate(ids[:place], max_new_tokens=3)
            assert result.sequences[0][0] == ids[place]
            assert (result.stats.accept_lengths[0][0] == 2) == right


def test_layers_that_add_nothing_are_left_out_first(search: LayerSearch) -> None:
    plan = LayerPlan(LAYERS, {})
    assert carry_out(plan, search, 2, ENDLESS, lambda: None)
    assert [each.layers for each in plan.exits] == [tuple(range(n)) for n in range(1, LAYERS)]
    assert [len(each.layers) for each in plan.steps] == [4, 3, 2]
    assert plan.steps[1].layers == (0, 2, 4) and plan.steps[1].alpha == 1
    assert plan.best() == plan.best(skip=2) == plan.steps[1]
    assert plan.best(skip=3).speedup < plan.best().speedup


def test_few_sets_are_tried_once_bounds_are_known(search: LayerSearch) -> None:
    tries: list[int] = []

    def goes_on() -> bool:
        tries[-1] += 1
        return True

    search.bounds.clear()
    layers = tuple(range(LAYERS))
    while len(layers) > 1:
        tries.append(0)
        layers = search.with_one_less(layers, goes_on)
    assert tries[0] <= LAYERS and sum(tries) < sum(range(2, LAYERS + 1))


def test_a_promise_is_leviathans(search: LayerSearch, target: Target) -> None:
    found = search.promise(range(2))
    part = part_of(target, (0, 1))
    assert found.alpha == alpha_of(part, search.reporting)
    layer = sum(weight.numel() for weight in target.layers[0].parameters())
    others = target.output_head.weight.numel()
    assert found.c == pytest.approx((2 * layer + others) / (LAYERS * layer + others), rel=0.01)
    tokens = sum(found.alpha**depth for depth in range(found.chain + 1))
    assert found.speedup == pytest.approx(tokens / (1 + found.chain * found.c))


def test_a_search_that_was_broken_off_goes_on(search: LayerSearch, tmp_path: Path) -> None:
    path, whole = tmp_path / "plan.json", LayerPlan(LAYERS, {"answers": "a"})
    carry_out(whole, search, 2, ENDLESS, lambda: None)
    first = LayerPlan.begun(path, LAYERS, {"answers": "a"})
    assert not carry_out(first, search, 2, 0, lambda: first.write(path, first.best(), {}))
    second = LayerPlan.begun(path, LAYERS, {"answers": "a"})
    assert second.exits == whole.exits and not second.steps
    assert carry_out(second, search, 2, ENDLESS, lambda: second.write(path, second.best(), {}))
    assert second == whole == LayerPlan.begun(path, LAYERS, {"answers": "a"})
    with pytest.raises(UserError, match="no plan for this target, these answers"):
        LayerPlan.begun(path, LAYERS, {"answers": "b"})
    path.write_text(path.read_text().replace('"alpha"', '"beta"'))
    with pytest.raises(UserError, match="is damaged"):
        LayerPlan.begun(path, LAYERS, {"answers": "a"})


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (1.25, "the best set is layers 0-2,4: of a chain of 3, 1.25 times plain decoding"),
        (0.95, "no set promises to be faster than plain decoding"),
        (1.0, "no set promises to be faster than plain decoding"),
    ],
)
def test_the_verdict_is_honest(speedup: float, said: str) -> None:
    best = LayerSet((0, 1, 2, 4), 0.8, 0.3, 3, speedup)
    assert verdict(best, Path("plan.json")).startswith(said)
