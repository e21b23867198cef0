"""Targets whose matrices are rounded to seven bits: another model, decoded as exactly as any."""

import pytest
import torch
from bandwidth import weight_bytes
from tiny import byte_tokenizer
from torch import nn

from drafthead.backends.cpu.packed_target import PackedTarget
from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.seven_bits import can_be_rounded, round_matrices, rounded
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.lab.exactness.oracle import OracleDecoder
from drafthead.lab.theory.chains import endless, greedy_stepper, pass_alone

PROMPTS = [[9, 10, 11], [20, 21, 22, 23]]


@pytest.fixture(scope="module")
def folder(make_target, tmp_path_factory):
    path = tmp_path_factory.mktemp("int7") / "target"
    make_target(seed=0, vocab=260).model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_a_row_is_whole_numbers_times_its_scale() -> None:
    numbers, scales = rounded(torch.tensor([[0.4, -0.26, 1.0], [0.0, 0.0, 0.0]]))
    assert numbers.tolist() == [[25, -16, 63], [0, 0, 0]]
    assert scales[0] == pytest.approx(1 / 63)


def test_rounding_again_changes_nothing() -> None:
    """In bfloat16 too, so that the bytes of a compiled pass are those of the stored weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8)).bfloat16()
    round_matrices(model)
    for layer in model:
        numbers, scales = rounded(layer.weight)
        assert numbers.abs().max() == 63
        assert torch.equal((numbers * scales[:, None]).bfloat16(), layer.weight)


def test_only_matrices_are_rounded() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 12), nn.Linear(12, 4), nn.LayerNorm(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    round_matrices(model)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"1.weight"}, "rows of 12 values do not fit the kernel"


def test_int7_is_a_type_of_targets(folder) -> None:
    target = load_decoder_only(folder, "int7", "cpu")
    stored = load_decoder_only(folder, "bfloat16", "cpu")
    assert (target.precision, target.dtype) == ("int7", torch.bfloat16)
    assert stored.precision == "bfloat16"
    theirs, found = stored.model.state_dict(), target.model.state_dict()
    assert any(not torch.equal(found[name], theirs[name]) for name in found)
    with pytest.raises(UserError, match="int7"):
        load_decoder_only(folder, "int6", "cpu")


def test_greedy_answers_are_those_of_the_rounded_model(folder, make_drafter) -> None:
    """In float32, where no two tokens are nearly equal."""
    target = load_decoder_only(folder, "int7", "cpu")
    target = Target(target.model.float(), target.tokenizer)
    expected = OracleDecoder(target).generate(PROMPTS, max_new_tokens=30).sequences
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    assert decoder.generate(PROMPTS, max_new_tokens=30).sequences == expected
    stored = OracleDecoder(load_decoder_only(folder, "float32", "cpu"))
    assert stored.generate(PROMPTS, max_new_tokens=30).sequences != expected


@torch.inference_mode()
def test_passes_of_our_kernels_read_bytes_and_compute_the_same(make_target, tmp_path) -> None:
    make_target(layers=1, vocab=260).model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = load_decoder_only(tmp_path, "int7", "cpu")
    compiled = target.packed()
    if not isinstance(compiled, PackedTarget):
        pytest.skip("there are no kernels for this processor")
    logits = []
    for each in (target, compiled):
        stepper = greedy_stepper(each, endless(PROMPTS[:1], 1), FeatureSpec((), False), 4)
        stepper.prefill()
        logits.append(pass_alone(stepper, 4)().logits.float())
    torch.testing.assert_close(*logits, rtol=2**-5, atol=2**-5 * logits[0].abs().max())
    assert weight_bytes(compiled, 1) < 0.7 * weight_bytes(target, 1)
    assert all(can_be_rounded(m) for m in target.model.modules() if isinstance(m, nn.Linear))
