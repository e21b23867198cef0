"""Prompts read by our kernels: for bfloat16 on processors that have them."""

import copy

import pytest
import torch
from tiny import random_prompts

from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.infer.engine.prefill import padded, prefill

PROMPTS = random_prompts(5)
SPEC = FeatureSpec(layers=(0,))


@pytest.fixture(scope="module")
def exact(make_target) -> Target:
    return make_target(hidden=128)


@pytest.fixture(scope="module")
def packed(exact) -> Target:
    found = Target(copy.deepcopy(exact.model).to(torch.bfloat16)).packed()
    if not found.reads_rows_alone:
        pytest.skip("there are no kernels for this processor")
    return found


def read(target: Target, prompts: list[list[int]], chunk: int = 1024):
    """Features, last hidden states and cache of prompts."""
    cache = target.new_cache()
    return *prefill(target, *padded(prompts, target.device), SPEC, cache, 4, chunk), cache


def test_states_are_as_near_to_float32_as_those_of_eager_passes(exact, packed) -> None:
    rounded = Target(packed.model)
    wanted, eager, found = (read(target, PROMPTS)[1].float() for target in (exact, rounded, packed))
    assert 0 < (found - wanted).norm() < 1.2 * (eager - wanted).norm()


def test_states_have_the_same_bits_whatever_is_read_beside_or_before(packed) -> None:
    """A prompt alone and among others, at once and in chunks."""
    features, hidden, cache = read(packed, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        for chunk in (1024, 2, 1):
            alone, end, own = read(packed, [prompt], chunk)
            used = slice(0, len(prompt))
            assert torch.equal(end[0], hidden[row])
            assert torch.equal(alone.taps[0][0], features.taps[0][row, used])
            assert torch.equal(own.keys[1][0, :, used], cache.keys[1][row, :, used])


def test_logits_after_a_prompt_have_the_same_bits_alone_and_in_a_batch(packed) -> None:
    hidden = read(packed, PROMPTS)[1]
    logits = packed.next_logits(hidden)
    for row in range(len(PROMPTS)):
        assert torch.equal(packed.next_logits(hidden[row : row + 1])[0], logits[row])
