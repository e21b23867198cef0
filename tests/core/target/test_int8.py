"""Targets of whole numbers of eight or four bits: another model, decoded as exactly as any."""

from copy import deepcopy

import pytest
import torch
from bandwidth import weight_bytes
from tiny import byte_tokenizer
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D
from wide import model_of

from drafthead.backends.cpu.packed_target import PackedTarget
from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.int8 import (
    LONGEST,
    TURNED,
    Int8Linear,
    product,
    rounded,
    turned,
)
from drafthead.core.target.rounding import to_int4, to_int8
from drafthead.core.target.target import Target
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer import Decoder
from drafthead.lab.exactness.oracle import OracleDecoder

PROMPTS = [[9, 10, 11], [20, 21, 22, 23]]


@pytest.fixture(scope="module")
def folder(make_target, tmp_path_factory):
    path = tmp_path_factory.mktemp("int8") / "target"
    make_target(seed=0, vocab=260).model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_turning_twice_gives_64_times_the_rows() -> None:
    x = torch.randn(3, 100)
    assert turned(x).shape == (3, 128)
    torch.testing.assert_close(turned(turned(x))[:, :100] / TURNED, x)


def test_a_row_is_whole_numbers_times_its_scale() -> None:
    """Of one value a turned block has that everywhere, with either sign."""
    x = torch.zeros(2, TURNED)
    x[0, 1] = -0.5
    numbers, scales = rounded(x)
    assert numbers.dtype == torch.int8
    assert numbers[0].tolist() == [-127, 127] * (TURNED // 2)
    assert scales[0] == pytest.approx(0.5 / 127) and not numbers[1].any()


@pytest.mark.parametrize("inner", [64, 100, 576])
def test_a_product_is_near_though_one_column_is_a_hundred_times_the_others(inner) -> None:
    """Without turning, one scale for all would leave the other columns next to nothing."""
    torch.manual_seed(inner)
    x, weight, bias = torch.randn(40, inner), torch.randn(30, inner), torch.randn(30)
    x[:, 7] *= 100
    exact = functional.linear(x, weight, bias)
    found = product(x, *rounded(weight), bias)
    assert (found - exact).norm() / exact.norm() < 0.02
    scales = x.abs().amax(1, keepdim=True) / 127
    alone = functional.linear((x / scales).round() * scales, weight, bias)
    assert (found - exact).norm() < 0.5 * (alone - exact).norm()


def test_a_row_of_infinite_numbers_has_no_finite_product() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.inf
    found = product(x, *rounded(torch.randn(8, 64)), None)
    assert not found[1].isfinite().any() and found[::2].isfinite().all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_whole_numbers_are_types_of_targets(folder, dtype) -> None:
    target = load_decoder_only(folder, dtype, "cpu")
    stored = load_decoder_only(folder, "bfloat16", "cpu")
    assert (target.precision, target.dtype) == (dtype, torch.bfloat16)
    assert stored.precision == "bfloat16"
    assert all(type(m) is not nn.Linear for m in target.model.modules())
    assert weights_fingerprint(target) != weights_fingerprint(stored)
    with pytest.raises(UserError, match=dtype):
        load_decoder_only(folder, "int7", "cpu")


def test_changed_weights_are_rounded_anew() -> None:
    layer = nn.Linear(64, 8, bias=False).bfloat16().requires_grad_(False)
    to_int8(nn.Sequential(layer))
    x = torch.randn(2, 64).bfloat16()
    first = layer(x)
    layer.weight.mul_(2)
    assert torch.equal(layer(x), 2 * first)


@pytest.mark.parametrize("packs", [False, True])
def test_weights_that_nobody_tells_of_are_rounded_anew_for_a_new_decoder(packs: bool) -> None:
    """Where they were written to by way of `weight.data`, as the docs promise after `forget`."""
    model = deepcopy(model_of("llama"))
    to_int8(model)

    def answers() -> list[list[int]]:
        target = Target(model)
        decoder = Decoder(target.packed() if packs else target)
        found = decoder.generate(PROMPTS, max_new_tokens=8).sequences
        decoder.forget()
        return found

    first = answers()
    products = [part for part in model.modules() if isinstance(part, Int8Linear)]
    for part in products:
        part.weight.data[[0, 1]] = part.weight.data[[1, 0]]
        part.weight.data[2:] *= -1
    second = answers()
    for part in products:  # other objects of the same values
        part.weight = nn.Parameter(part.weight.detach().clone(), requires_grad=False)
    assert answers() == second != first


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(LONGEST + 1, 2, device="meta")


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.most = nn.Linear(8, 8), Conv1D(64, 64)


@pytest.mark.parametrize(("model", "words"), [(Long, "sums up to"), (Other, "are in Conv1D")])
def test_what_cannot_be_whole_numbers_is_named(model, words) -> None:
    with pytest.raises(UserError, match=words):
        to_int8(model())


def test_greedy_answers_are_those_of_the_rounded_model(folder, make_drafter) -> None:
    """In float32, where no two tokens are nearly equal."""
    target = load_decoder_only(folder, "int8", "cpu")
    target = Target(target.model.float(), target.tokenizer)
    expected = OracleDecoder(target).generate(PROMPTS, max_new_tokens=30).sequences
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    assert decoder.generate(PROMPTS, max_new_tokens=30).sequences == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_loss_is_near_that_of_bfloat16(kind) -> None:
    """Layers that are one call, and layers of other modules."""
    target = Target(deepcopy(model_of(kind)))
    ids = torch.randint(4, target.vocab_size, (1, 60), generator=torch.manual_seed(0))
    losses = []
    for _ in range(2):
        logits = target.model(ids).logits[0, :-1].float()
        losses.append(functional.cross_entropy(logits, ids[0, 1:]).item())
        to_int8(target.model)
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


ROUNDINGS = pytest.mark.parametrize(("rounding", "dtype"), [(to_int8, "int8"), (to_int4, "int4")])


@ROUNDINGS
@torch.inference_mode()
def test_kernels_compute_the_modules_products_from_bytes(rounding, dtype) -> None:
    """Bit for bit in every row, whatever a pass reads beside it: greedy text stays."""
    target = Target(deepcopy(model_of("llama")))
    rounding(target.model)
    packed = target.packed()
    if not isinstance(packed, PackedTarget):
        pytest.skip("there are no kernels for this processor")
    assert packed.same_bits and packed.precision == dtype and packed.decoder is not None
    assert not any(type(m) is nn.Linear for m in target.model.modules())
    assert weight_bytes(packed, 1) < 0.7 * weight_bytes(Target(model_of("llama")), 1)
    ids, found = torch.arange(4, 44)[None], []
    for width in (40, 8, 1):
        cache, logits = packed.new_cache(), []
        packed.begin(cache, 40)
        for start in range(0, 40, width):
            places = torch.arange(start, start + width)
            mask = packed.later_mask(cache, places)
            part = ids[:, start : start + width]
            logits.append(packed.run(part, places[None], mask, NO_FEATURES, cache).logits)
            cache.commit(None, places[-1:] + 1, start + width)
        found.append(torch.cat(logits, dim=1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    plain = target.model(ids).logits
    assert (found[0] - plain).float().norm() / plain.float().norm() < 0.02


@ROUNDINGS
def test_drafts_change_no_answer_of_kernels(make_head, rounding, dtype) -> None:
    """A draft of every shape, in a batch and alone, by our kernels where there are any."""
    target = Target(deepcopy(model_of("llama")))
    rounding(target.model)
    target = target.packed()
    if not isinstance(target, PackedTarget):
        pytest.skip("there are no kernels for this processor")
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=24).sequences
    head = make_head("medusa", target).to(torch.bfloat16)
    decoder = Decoder(target, drafter_for(head, target))
    assert decoder.generate(PROMPTS, max_new_tokens=24).sequences == plain
    assert [decoder.generate([p], max_new_tokens=24).sequences[0] for p in PROMPTS] == plain
