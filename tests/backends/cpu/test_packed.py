"""Our kernels in a model's own modules: what they compute, where they are used, and where not."""

import copy
import logging

import psutil
import pytest
import torch
from tiny import random_prompts
from torch import nn
from wide import HEAD, WIDTH, model_of

from drafthead.backends.cpu.kernels import library, operations, packing
from drafthead.backends.cpu.packed_modules import PackedLayer, PackedLinear, PackedNorm
from drafthead.backends.cpu.packed_target import PackedTarget, tell_of_torch
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.one_width import is_alike
from drafthead.core.target.target import Target
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.loading.loaded import prepared_target

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
IN_ONE_CALL = {  # whose layers are one kernel each
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}
PART_BY_PART = "gemma3_text", "olmo2", "granite", "phi3", "gpt_neox", "starcoder2", "smollm3"
LOG = "drafthead.backends.cpu.packed_target"


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers."""
    return (torch.randn(shape) * scale).bfloat16()


@pytest.mark.parametrize("has_extras", [False, True])
def test_a_layer_in_one_call_computes_what_its_definition_says(has_extras) -> None:
    """`operations` has the definitions; with norms of queries and keys and biases, and without."""
    torch.manual_seed(0)
    heads, groups, inner, tokens = 4, 2, 96, 5
    nothing = torch.empty(0, dtype=torch.bfloat16)

    def extra(size: int) -> torch.Tensor:
        return numbers(size) if has_extras else nothing

    products = [numbers(HEAD * n, WIDTH, scale=0.1) for n in (heads, groups, groups)]
    gates = [numbers(inner, WIDTH, scale=0.1) for _ in range(2)]
    weights = [
        numbers(WIDTH), packing.pack(products), extra(HEAD * (heads + 2 * groups)),
        extra(HEAD), extra(HEAD), packing.pack([numbers(WIDTH, heads * HEAD, scale=0.1)]),
        extra(WIDTH), numbers(WIDTH), packing.pack(gates, True),
        packing.pack([numbers(WIDTH, inner, scale=0.1)]),
    ]  # fmt: skip
    positions = torch.stack([torch.arange(tokens), torch.arange(tokens) * 900])
    cos, sin = torch.ops.drafthead.rotations(positions, torch.rand(HEAD // 2), 1.0)
    expected = operations.rotations(positions, torch.rand(HEAD // 2), 1.0)
    assert cos.shape == expected[0].shape and sin.dtype == torch.bfloat16
    mask = torch.where(torch.rand(2, 1, tokens, 20) < 0.7, 0, torch.finfo(torch.bfloat16).min)
    states = numbers(2, 2, groups, 30, HEAD)
    given = numbers(2, tokens, WIDTH), cos, sin, mask.bfloat16()
    results = []
    for layers in (torch.ops.drafthead.decoder_layers, operations.decoder_layers):
        keys, values = states.clone()
        cache = [keys, keys], [values, values], torch.arange(15, 20)
        first, both = layers(*given, *cache, [*weights, *weights], 1e-5, 0.2, [0, 1])
        [last] = layers(*given, *cache, [*weights, *weights], 1e-5, 0.2, [1])
        assert torch.equal(last, both)
        results.append((first, both, keys, values))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=0.05)


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_has_the_bits_of_its_definition(plus_one) -> None:
    torch.manual_seed(0)
    given = numbers(2, 3, 96), numbers(96), 1e-6, plus_one
    found, wanted = torch.ops.drafthead.rms_norm(*given), operations.rms_norm(*given)
    assert (found != wanted).float().mean() < 0.01  # the sum of squares is taken in another order
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-6)


def test_rotations_are_those_of_the_definition() -> None:
    given = torch.tensor([[0, 1, 7000]]), 10000 ** -torch.linspace(0, 1, 32), 1.5
    pairs = zip(torch.ops.drafthead.rotations(*given), operations.rotations(*given), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_layers_of_llamas_kind_are_one_call_with_the_same_bits(name) -> None:
    target = Target(model_of(name, **IN_ONE_CALL[name])).packed()
    assert isinstance(target, PackedTarget)
    kinds = [type(part) for part in target.called.modules()]
    assert kinds.count(PackedLayer) == 2 and kinds.count(PackedLinear) == 1  # the output head
    assert nn.Linear not in kinds and PackedNorm in kinds
    assert target.same_bits and is_alike(target)


@pytest.mark.parametrize("taps", [(), (1,), (0, 2), (-1, 2), (3,)])
def test_all_layers_are_one_call_whichever_states_are_read(taps, monkeypatch) -> None:
    """They are those that each layer gives alone."""
    torch.manual_seed(0)
    target = Target(model_of("qwen3", num_hidden_layers=4)).packed()
    assert isinstance(target, PackedTarget)
    calls, layers = [], torch.ops.drafthead.decoder_layers

    def counted(*given: object) -> torch.Tensor:
        calls.append(len(given[4]))
        return layers(*given)

    monkeypatch.setattr(torch.ops.drafthead, "decoder_layers", counted)
    ids = torch.arange(9, 15)[None]
    outputs = []
    for spec in (FeatureSpec(taps), FeatureSpec(layers=(-1, 0, 1, 2, 3))):
        cache = target.new_cache()
        target.begin(cache, 8)
        mask = target.later_mask(cache, torch.arange(6))
        calls.clear()
        outputs.append(target.run(ids, torch.arange(6)[None], mask, spec, cache))
        if spec.layers == taps:
            assert calls == [4]
    few, all_states = outputs
    assert torch.equal(few.logits, all_states.logits)
    for tap, states in zip(taps, few.features.taps, strict=True):
        assert torch.equal(states, all_states.features.taps[tap + 1])


def test_layers_that_see_other_columns_are_called_one_by_one() -> None:
    settings = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    target = Target(model_of("qwen3", use_sliding_window=True, **settings)).packed()
    assert isinstance(target, PackedTarget) and type(target.layers) is nn.ModuleList
    assert target.same_bits and is_alike(target)


@pytest.mark.parametrize("name", PART_BY_PART)
def test_other_layers_are_packed_part_by_part(name) -> None:
    """A promise of the same bits is made only where a trial keeps it."""
    target = Target(model_of(name)).packed()
    assert isinstance(target, PackedTarget)
    kinds = [type(part) for part in target.called.modules()]
    assert PackedLinear in kinds and nn.Linear not in kinds and PackedLayer not in kinds
    assert not target.same_bits or is_alike(target)


@pytest.mark.parametrize("size", [20, 48, 80, 100])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_heads_of_any_size_keep_the_text_of_plain_decoding(name, size) -> None:
    """They are padded with zeros to a size that the kernels take."""
    model = model_of(name, head=size)
    target = Target(model).packed()
    assert isinstance(target, PackedTarget) and target.same_bits
    drafted, plain = Decoder(target, PromptLookup(6)), Decoder(target)
    drafted.end_ids = plain.end_ids = frozenset()
    prompts = [prompt * 2 for prompt in random_prompts(3)]
    answers = drafted.generate(prompts, max_new_tokens=40).sequences
    assert answers == [plain.generate(p, max_new_tokens=40).sequences[0] for p in prompts]


def test_a_model_that_rounds_by_the_size_of_a_pass_gets_no_promise() -> None:
    """Doge's does, and six tokens do not show it."""
    target = Target(model_of("doge", head=HEAD)).packed()
    assert isinstance(target, PackedTarget) and not target.same_bits


@pytest.fixture(scope="module")
def wide() -> Target:
    """A target whose layers are one call each."""
    return Target(model_of("llama"))


def test_any_draft_gives_the_text_of_plain_decoding(wide, drafter_name, make_drafter) -> None:
    """Greedy and drawn, in a batch and alone, by our kernels."""
    drafter = make_drafter(drafter_name, wide)
    alone = getattr(drafter, "drafter", drafter)
    if hasattr(alone, "head"):
        alone.head.to(torch.bfloat16)
    drafted, plain = (decoder_for(wide, each, None, None) for each in (drafter, None))
    assert drafted.target.same_bits and plain.target.same_bits
    prompts = random_prompts(3)
    for temperature, rule in ((0.0, "greedy"), (0.8, "match")):
        options = {"max_new_tokens": 16, "temperature": temperature, "verifier": rule}
        answers = drafted.generate(prompts, **options, seed=5).sequences
        for row, prompt in enumerate(prompts):
            expected = plain.generate(prompt, **options, seed=5 + row).sequences
            assert expected == [answers[row]], (temperature, row)


def test_weights_that_change_are_packed_again() -> None:
    model = model_of("llama")
    decoder = Decoder(prepared_target(Target(model), None))
    [prompt] = random_prompts(1)
    before = decoder.generate(prompt, max_new_tokens=8).sequences
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    after = decoder.generate(prompt, max_new_tokens=8).sequences
    fresh = Decoder(prepared_target(Target(copy.deepcopy(model)), None))
    assert after == fresh.generate(prompt, max_new_tokens=8).sequences != before


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("qwen2")
    kinds, names = [type(part) for part in model.modules()], list(model.state_dict())
    decoder = Decoder(prepared_target(Target(model), None))
    decoder.generate(random_prompts(1), max_new_tokens=2)
    assert [type(part) for part in model.modules()] == kinds
    assert list(model.state_dict()) == names and model.config._attn_implementation == "sdpa"


def test_torchs_kernels_run_where_ours_cannot_and_the_log_says_why(caplog) -> None:
    tell_of_torch.cache_clear()
    caplog.set_level(logging.INFO, LOG)
    hooked = model_of("llama")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not prepared_target(Target(hooked), None).same_bits
    assert "hooks on its modules read or change what these compute" in caplog.text
    later = model_of("llama")
    decoder = Decoder(prepared_target(Target(later), None))
    [prompt], seen = random_prompts(1), []
    later.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    decoder.generate(prompt, max_new_tokens=2)
    assert len(seen) > 2
    for plain in (Target(model_of("llama").float()), Target(model_of("llama"))):
        assert not prepared_target(plain, False).backend.has_kernels


def test_weights_that_do_not_fit_twice_are_not_packed(caplog, monkeypatch) -> None:
    tell_of_torch.cache_clear()
    caplog.set_level(logging.INFO, LOG)
    model = model_of("llama")
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert not isinstance(Target(model).packed(), PackedTarget)
    assert "GB more, and 1e-06 are free" in caplog.text


def test_a_layer_that_computes_something_else_is_not_replaced(caplog, monkeypatch) -> None:
    tell_of_torch.cache_clear()
    caplog.set_level(logging.INFO, LOG)
    model = model_of("llama")
    kind = type(model.model.layers[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, **o: forward(self, x, **o) + x)
    assert not isinstance(Target(model).packed(), PackedTarget)
    assert "a layer would give something else" in caplog.text
