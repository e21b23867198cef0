"""Prompts read in groups and chunks: the same answers and states as of one pass."""

from itertools import pairwise, product

import pytest
import torch
from tiny import random_prompts
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
)

from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.families.recurrent.drafter import RecurrentSession
from drafthead.infer import Decoder
from drafthead.infer.engine.prefill import PASS_COST, padded, prefill, prompt_groups

IN_CHUNKS = GenerationConfig(prefill_chunk_size=3)
PROMPTS = random_prompts(8)


def read(target: Target, chunk: int, features: FeatureSpec):
    ids, lengths = padded(PROMPTS, target.device)
    cache = target.new_cache()
    return *prefill(target, ids, lengths, features, cache, room=4, chunk=chunk), cache


@pytest.fixture
def many_groups(monkeypatch) -> None:
    """Rows of different lengths are read in passes of their own."""
    monkeypatch.setitem(PASS_COST, "cpu", 0)


@pytest.fixture(params=[1, 3, 7, 100])
def chunk(request) -> int:
    return request.param


@pytest.mark.parametrize("pass_cost", [0, 8, 1000])
def test_states_of_groups_and_chunks_are_those_of_one_pass(
    target, chunk, pass_cost, monkeypatch
) -> None:
    spec = FeatureSpec(layers=(-1, 0))
    monkeypatch.setitem(PASS_COST, "cpu", 1000)
    expected, expected_hidden, whole = read(target, 100, spec)
    monkeypatch.setitem(PASS_COST, "cpu", pass_cost)
    features, hidden, cache = read(target, chunk, spec)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-5, rtol=1e-4)
    assert torch.equal(cache.lengths, whole.lengths) and cache.longest == whole.longest
    for row, prompt in enumerate(PROMPTS):
        used = slice(0, len(prompt))
        pairs = [*zip(features.taps, expected.taps, strict=True), (features.last, expected.last)]
        for found, wanted in pairs:
            torch.testing.assert_close(found[row, used], wanted[row, used], atol=1e-5, rtol=1e-4)
        for found, wanted in zip(cache.keys, whole.keys, strict=True):
            torch.testing.assert_close(
                found[row, :, used], wanted[row, :, used], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize(
    ("lengths", "pass_cost", "groups"),
    [
        ([9, 70, 8], 10, [[2, 0], [1]]),
        ([9, 70, 8], 0, [[2], [0], [1]]),
        ([9, 70, 8], 1000, [[2, 0, 1]]),
        ([5, 5, 5], 1, [[0, 1, 2]]),
        ([4], 0, [[0]]),
    ],
)
def test_prompts_of_similar_length_are_read_together(lengths, pass_cost, groups) -> None:
    assert prompt_groups(lengths, pass_cost) == groups


@pytest.mark.parametrize("pass_cost", [0, 3, 20])
def test_no_other_way_to_group_prompts_costs_less(pass_cost) -> None:
    lengths = [len(prompt) for prompt in PROMPTS]

    def cost(groups) -> int:
        return sum(pass_cost + len(rows) * max(lengths[row] for row in rows) for rows in groups)

    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    ways = []
    for cuts in product([False, True], repeat=len(lengths) - 1):
        ends = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(lengths)]
        ways.append([by_length[start:end] for start, end in pairwise(ends)])
    assert cost(prompt_groups(lengths, pass_cost)) == min(map(cost, ways))


def test_a_pass_reads_no_more_positions_than_its_group_has(
    target, many_groups, monkeypatch
) -> None:
    shapes = []
    real = Target.read

    def watched(self, input_ids, *arguments, **options):
        shapes.append(tuple(input_ids.shape))
        return real(self, input_ids, *arguments, **options)

    monkeypatch.setattr(Target, "read", watched)
    Decoder(target).generate([[9] * 6, [9] * 2, [9] * 6], max_new_tokens=1)
    assert shapes == [(1, 2), (2, 6)]


def test_a_head_reads_no_more_positions_than_its_group_has(
    target, make_drafter, many_groups, monkeypatch
) -> None:
    read, shapes = RecurrentSession.read, []

    def watched(self: RecurrentSession, committed: Committed) -> None:
        shapes.append(tuple(committed.tokens.shape))
        read(self, committed)

    monkeypatch.setattr(RecurrentSession, "read", watched)
    decoder = Decoder(target, make_drafter("eagle3:chain", target))
    decoder.generate([[9] * 20, [9] * 12, [9] * 20], max_new_tokens=1)
    assert shapes == [(1, 12), (2, 20)]


def test_what_is_known_of_prompts_is_read_in_no_group(target, many_groups) -> None:
    spec, beginning = FeatureSpec(layers=(0,)), PROMPTS[0][:2]
    prompts = [beginning + prompt for prompt in PROMPTS]
    ids, lengths = padded(prompts, target.device)
    whole = target.new_cache()
    expected, expected_hidden = prefill(target, ids, lengths, spec, whole, room=4)
    cache = target.new_cache()
    known, known_lengths = padded([beginning] * len(prompts), target.device)
    prefill(target, known, known_lengths, spec, cache, room=0)
    features, hidden = prefill(target, ids, lengths, spec, cache, room=4)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-5, rtol=1e-4)
    for row, prompt in enumerate(prompts):
        found = features.taps[0][row, : len(prompt) - 2]
        wanted = expected.taps[0][row, 2 : len(prompt)]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        found, wanted = (layers.keys[0][row, :, : len(prompt)] for layers in (cache, whole))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_only_features_that_a_drafter_reads_are_kept_for_all_positions(target) -> None:
    features, hidden, _ = read(target, 3, FeatureSpec(layers=(), last=False))
    assert features.last is None and features.taps == ()
    assert hidden.shape == (len(PROMPTS), target.hidden_size)


@pytest.mark.parametrize("rows", [1, 8])
def test_answers_do_not_depend_on_groups_and_chunks(
    target, make_drafter, drafter_name, rows, monkeypatch
) -> None:
    monkeypatch.setitem(PASS_COST, "cpu", 0)
    whole = Decoder(target).generate(PROMPTS[:rows], max_new_tokens=16).sequences
    chunks = Committed.chunks
    monkeypatch.setattr(Committed, "chunks", lambda self: chunks(self, 4))
    decoder = Decoder(target, make_drafter(drafter_name, target))
    result = decoder.generate(PROMPTS[:rows], max_new_tokens=16, generation_config=IN_CHUNKS)
    assert result.sequences == whole
    monkeypatch.undo()  # one group, one chunk
    fresh = Decoder(target, make_drafter(drafter_name, target))  # some learn from their drafts
    assert result.stats.accept_lengths == (
        fresh.generate(PROMPTS[:rows], max_new_tokens=16).stats.accept_lengths
    ), "the drafter has read the same"


SMALL = {"vocab_size": 64, "hidden_size": 32, "initializer_range": 0.3, "eos_token_id": None}


MODELS = {
    "sliding window": lambda: MistralForCausalLM(
        MistralConfig(
            **SMALL,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            sliding_window=5,
            max_position_embeddings=128,
        )
    ),
    "ALiBi": lambda: BloomForCausalLM(BloomConfig(**SMALL, n_layer=2, n_head=4)).eval(),
}


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_alibi_reach_over_chunks(name) -> None:
    torch.manual_seed(0)
    target = Target(MODELS[name]())
    whole = Decoder(target).generate(PROMPTS, max_new_tokens=16).sequences
    answers = Decoder(target).generate(PROMPTS, max_new_tokens=16, generation_config=IN_CHUNKS)
    assert answers.sequences == whole


def test_no_pass_over_a_prompt_is_longer_than_a_chunk(target, monkeypatch) -> None:
    widths = []
    read = Target.read

    def watched(self, input_ids, *arguments, **options):
        widths.append(input_ids.shape[1])
        return read(self, input_ids, *arguments, **options)

    monkeypatch.setattr(Target, "read", watched)
    Decoder(target).generate([9] * 20, max_new_tokens=1, generation_config=IN_CHUNKS)
    assert widths == [3] * 6 + [2]


@pytest.mark.parametrize("size", [0, 2.5])
def test_a_senseless_chunk_is_refused_by_name(target, size) -> None:
    config = GenerationConfig()
    config.prefill_chunk_size = size
    with pytest.raises(UserError, match="prefill_chunk_size"):
        Decoder(target).generate([9], generation_config=config)


def test_parts_of_what_was_committed_end_where_each_row_ends() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 0, 0, 0, 0]])
    committed = Committed(tokens, Features(tokens[..., None].float()), torch.tensor([5, 2, 1]))
    parts = [
        [
            row[:count]
            for row, count in zip(part.tokens.tolist(), part.lengths.tolist(), strict=True)
        ]
        for part in committed.chunks(2)
    ]
    assert parts == [[[1], [], []], [[2, 3], [], []], [[4, 5], [6, 7], [8]]]
