"""Models of transformers with the attention kernel, interpreted or on a GPU; see conftest.py."""

import os

import pytest
import torch
from architectures import ARCHITECTURES, GROUPED, tiny_model
from tiny import VOCAB
from tree_reference import random_ancestors

from drafthead.backends.cuda.registration import NAME, in_attention_of, reason_against, sights
from drafthead.backends.cuda.tree_kernels import KernelCache
from drafthead.core.errors import UserError
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import TreeCache

DEVICE = os.environ["KERNELS_ON"]
LENGTHS, NODES = (9, 4), 5  # within the window and beyond it
# Learnt positions, windows, caps, sinks, chunks, and layers that share keys and values.
SERVED = "gpt2", "mistral", "qwen2", "gemma2", "gpt_oss", "llama4_text", "gemma4_text"
REFUSED = {
    "falcon:alibi": "computes its attention by itself",
    "deepseek_v3": "keys and values differ in width",
}


def target_of(name: str) -> Target:
    return Target(tiny_model(name, ARCHITECTURES[name]).to(DEVICE))


def committed(target: Target) -> TreeCache:
    """A cache with prompts of both lengths."""
    cache, longest = target.new_cache(), max(LENGTHS)
    ids = torch.randint(1, VOCAB, (len(LENGTHS), longest), device=DEVICE)
    positions = torch.arange(longest, device=DEVICE).expand_as(ids)
    target.run(ids, positions, None, NO_FEATURES, cache)
    cache.commit_prompt(torch.tensor(LENGTHS, device=DEVICE), longest, room=NODES)
    return cache


def kernel_pass(
    target: Target, cache: TreeCache, ids: torch.Tensor, visible: torch.Tensor, gaps: bool
) -> torch.Tensor:
    """The logits [B, N, V] of a pass over a tree; `visible` is [B, N, N]."""
    starts = torch.full_like(cache.lengths, cache.longest) if gaps else None
    depths = visible.sum(-1) - 1
    options = {target.cache_name: KernelCache(cache.keys, cache.values)}
    with torch.no_grad(), in_attention_of(target.config):
        return target.model(
            input_ids=ids,
            position_ids=cache.lengths[:, None] + depths,
            attention_mask=sights(visible, cache.lengths, starts, target.layer_kinds),
            use_cache=True,
            **options,
        ).logits


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_with_a_mask(name: str) -> None:
    target = target_of(name)
    assert reason_against(target.model, target.config) is None
    cache, random = committed(target), torch.Generator().manual_seed(1)
    visible = random_ancestors(len(LENGTHS), NODES, random).to(DEVICE)
    ids = torch.randint(1, VOCAB, (len(LENGTHS), NODES), device=DEVICE)
    found = kernel_pass(target, cache, ids, visible, gaps=False)
    mask = cache.additive_mask(visible, target.dtype)
    positions = cache.lengths[:, None] + visible.sum(-1) - 1
    expected = target.run(ids, positions, mask, NO_FEATURES, cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_have_it_are_named_with_the_reason(name: str) -> None:
    target = target_of(name)
    assert REFUSED[name] in reason_against(target.model, target.config)


def test_models_that_count_columns_are_refused() -> None:
    target = target_of("opt")
    cache, visible = committed(target), torch.ones(2, 1, 1, dtype=torch.bool, device=DEVICE)
    ids = torch.ones(2, 1, dtype=torch.long, device=DEVICE)
    with pytest.raises(UserError, match="counts columns of its cache"):
        kernel_pass(target, cache, ids, visible, gaps=False)


def test_states_are_stored_where_the_present_cache_has_them() -> None:
    target = target_of("llama")
    cache, visible = committed(target), torch.ones(2, 3, 3, dtype=torch.bool, device=DEVICE).tril()
    ids = torch.randint(1, VOCAB, (2, 3), device=DEVICE)
    kernel_pass(target, cache, ids, visible, gaps=True)
    found = [states.clone() for states in cache.states]
    mask = cache.additive_mask(visible, target.dtype)
    positions = cache.lengths[:, None] + torch.arange(3, device=DEVICE)
    target.run(ids, positions, mask, NO_FEATURES, cache)
    torch.testing.assert_close(found, cache.states)


def test_passes_without_the_kernel_are_as_before() -> None:
    target = target_of("llama")
    usual = target.config._attn_implementation
    with pytest.raises(RuntimeError), in_attention_of(target.config):
        assert target.config._attn_implementation == NAME
        raise RuntimeError
    assert target.config._attn_implementation == usual


def test_other_caches_are_refused() -> None:
    target = target_of("llama")
    ids = torch.ones(1, 3, dtype=torch.long, device=DEVICE)
    with in_attention_of(target.config), pytest.raises(UserError, match="not of the tree's cache"):
        target.model(ids)


def test_attention_with_what_the_kernel_does_not_know_is_refused() -> None:
    target = Target(tiny_model("llama", GROUPED).to(DEVICE))
    cache, visible = committed(target), torch.ones(2, 1, 1, dtype=torch.bool, device=DEVICE)
    masks = sights(visible, cache.lengths, None, target.layer_kinds)
    ids, kept = (
        torch.ones(2, 1, dtype=torch.long, device=DEVICE),
        KernelCache(cache.keys, cache.values),
    )
    options = {target.cache_name: kept, "position_bias": torch.zeros(1)}
    with in_attention_of(target.config), pytest.raises(UserError, match="with position_bias"):
        target.model(ids, attention_mask=masks, position_ids=cache.lengths[:, None], **options)
