"""bfloat16 by our kernels or in passes of one width: a token has always the same bits."""

import copy
import random

import pytest
import torch
from tiny import BUSHY, random_prompts
from transformers import FalconConfig, FalconForCausalLM
from wide import model_of

from drafthead.core.errors import UserError
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.one_width import OneWidthTarget
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import TreeCache
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.prefill import padded, prefill
from drafthead.infer.loading.loaded import prepared_target
from drafthead.lab.exactness.exactness import greedy_differences

PROMPTS = random_prompts(3)


@pytest.fixture(scope="module")
def one_width(make_target) -> OneWidthTarget:
    """Not compiled."""
    return OneWidthTarget(Target(copy.deepcopy(make_target(hidden=128).model).to(torch.bfloat16)))


@pytest.fixture(scope="module")
def packed(make_target) -> Target:
    """With our kernels at once."""
    target = Target(copy.deepcopy(make_target(hidden=128).model).to(torch.bfloat16)).packed()
    if not target.same_bits:
        pytest.skip("there are no kernels for this processor")
    return target


@pytest.fixture(params=["packed", "one_width"])
def target(request) -> Target:
    """A target whose passes have the same bits."""
    return request.getfixturevalue(request.param)


def read(target: Target, prompts: list[list[int]], room: int) -> TreeCache:
    """A cache that holds the prompts."""
    cache = target.new_cache()
    prefill(target, *padded(prompts, target.device), NO_FEATURES, cache, room)
    return cache


def plain_logits(target: Target, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The logits [T, V] after each token, one token a pass."""
    cache, found = read(target, [prompt], 1), []
    for token in tokens:
        mask = cache.additive_mask(torch.ones(1, 1, 1, dtype=torch.bool), target.dtype)
        given = torch.tensor([[token]]), cache.positions(1), mask, NO_FEATURES, cache
        found.append(target.run(*given).logits[0, 0])
        cache.commit(None, cache.lengths + 1, cache.longest + 1)
    return torch.stack(found)


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to a node."""
    return [*(path_to(parents[node], parents) if node else []), node]


def tree_logits(
    target: Target,
    prompts: list[list[int]],
    parents: list[list[int]],
    tokens: torch.Tensor,  # [B, N]
    room: int = 1,
) -> torch.Tensor:
    """The logits [B, N, V] of one pass over a tree after each prompt."""
    cache, size = read(target, prompts, room), tokens.shape[1]
    visible = torch.zeros(len(prompts), size, size, dtype=torch.bool)
    for row, of_row in enumerate(parents):
        for node in range(size):
            visible[row, node, path_to(node, of_row)] = True
    positions = cache.lengths[:, None] + visible.sum(-1) - 1
    mask = cache.additive_mask(visible, target.dtype)
    return target.run(tokens, positions, mask, NO_FEATURES, cache).logits


@pytest.mark.parametrize("threads", [1, 2])
def test_nodes_of_trees_in_a_batch_have_the_logits_of_plain_passes(target, threads) -> None:
    chance, generator = random.Random(threads), torch.Generator().manual_seed(threads)
    torch.set_num_threads(threads)
    for nodes in (2, 12, 40) if target.backend.has_kernels else (40,):
        parents = [
            [-1] + [chance.randrange(max(0, node - 4), node) for node in range(1, nodes)]
            for _ in PROMPTS
        ]
        tokens = torch.randint(8, 64, (3, nodes), generator=generator)
        prompts = [prompt * chance.randint(1, 4) for prompt in PROMPTS]
        found = tree_logits(target, prompts, parents, tokens, chance.randrange(1, 300))
        for row, node in enumerate((nodes // 2, nodes - 2, nodes - 1)):
            path = path_to(node, parents[row])
            plain = plain_logits(target, prompts[row], tokens[row, path].tolist())
            assert torch.equal(found[row, path], plain), (nodes, row, node)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_answers_of_a_batch_are_plain_ones(target, make_head, temperature) -> None:
    """Greedy ones, and those of `match` for the same seeds."""
    drafter = drafter_for(make_head("medusa", target).to(torch.bfloat16), target, BUSHY)
    drafted, plain = Decoder(target, drafter), Decoder(target)
    drafted.end_ids = plain.end_ids = frozenset()
    options = {"max_new_tokens": 24, "temperature": temperature}
    answers = drafted.generate(PROMPTS, **options, seed=5).sequences
    for row, prompt in enumerate(PROMPTS):
        assert plain.generate(prompt, **options, seed=5 + row).sequences == [answers[row]]
    if temperature == 0:  # by other code than the engine's
        assert greedy_differences(drafted, Target(target.model), PROMPTS, 24) == []


def test_the_promise_is_not_made_where_torch_multiplies(packed, make_target) -> None:
    assert packed.same_bits and not Target(packed.model).same_bits
    assert not make_target().packed().same_bits  # float32
    assert not Target(model_of("mixtral")).packed().same_bits  # its experts


def test_passes_of_one_width_are_refused_where_they_do_not_help(make_target) -> None:
    model = copy.deepcopy(make_target().model).to(torch.bfloat16)
    assert prepared_target(Target(model), None, same_bits=True).same_bits
    with pytest.raises(UserError, match="in float32 rounding is far below"):
        prepared_target(make_target(), None, same_bits=True)
    by_all = copy.deepcopy(model)
    mlp = by_all.model.layers[0].mlp
    mlp.register_forward_hook(lambda _mlp, _given, found: found * found.abs().amax())
    with pytest.raises(UserError, match="rounds a token differently beside others"):
        OneWidthTarget(Target(by_all))


def test_queries_of_several_heads_that_share_keys_need_not_be_contiguous() -> None:
    """Falcon's are a transposed view; the target is wrapped, or refused in a sentence."""
    config = FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True, alibi=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    target = OneWidthTarget(Target(FalconForCausalLM(config).bfloat16()))
    assert len(Decoder(target).generate([[9, 10]], max_new_tokens=3).sequences[0]) == 3
