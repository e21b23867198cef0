"""Checkpoints with 4 bits by group: what they hold is what decodes, in blocks or dequantised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_target
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.block_modules import blocks_in

GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
GPTQ_2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
USUAL, AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)
INPUTS = 128
IDS = torch.arange(4, 44)[None]
Tensors = dict[str, torch.Tensor]


def packed_settings(**weights: object) -> dict[str, Any]:
    of = {"num_bits": 4, "type": "int", "strategy": "group", "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of}},
    }  # fmt: skip


def word_rows(numbers: torch.Tensor, order: tuple[int, ...] = USUAL) -> torch.Tensor:
    """Numbers [8 n, M] of 4 bits in words [n, M] int32, the first of an order lowest."""
    made = torch.zeros(len(numbers) // 8, numbers.shape[1], dtype=torch.int64)
    for place, number in enumerate(order):
        made |= numbers[number::8].long() << 4 * place
    return (made - (made >> 31 << 32)).int()


def as_gptq(n: torch.Tensor, s: torch.Tensor, z: torch.Tensor, less: int = 1) -> Tensors:
    group = n.shape[1] // s.shape[1]
    return {
        "qweight": word_rows(n.T), "qzeros": word_rows(z - less & 15).T, "scales": s.T,
        "g_idx": torch.arange(n.shape[1]).int() // group,
    }  # fmt: skip


def as_awq(n: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> Tensors:
    both = {"qweight": word_rows(n, AWQ_ORDER).T, "qzeros": word_rows(z, AWQ_ORDER).T}
    return {**both, "scales": s.T}


def as_packed(n: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> Tensors:
    zeros = {} if (z == 8).all() else {"weight_zero_point": word_rows(z)}
    shape = torch.tensor(n.shape)
    return {"weight_packed": word_rows(n.T).T, "weight_scale": s, "weight_shape": shape, **zeros}


METHODS = {
    "gptq": (GPTQ, as_gptq),
    "gptq_v2": (GPTQ_2, lambda *of: as_gptq(*of, less=0)),
    "awq": (AWQ, as_awq),
    "packed": (packed_settings(), as_packed),
}


def write_checkpoint(
    folder: Path, method: str, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> PreTrainedModel:
    """A small target whose products are stored in 4 bits; returns the model that it describes."""
    write_target(folder, hidden_size=INPUTS, intermediate_size=2 * INPUTS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings, packer = METHODS[method]
    tensors, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if not name.endswith("_proj.weight"):
            continue
        groups = weight.shape[0], weight.shape[1] // group
        numbers = torch.randint(0, 16, weight.shape, generator=chance)
        zeros = torch.randint(0, 16, groups, generator=chance)
        zeros = torch.full(groups, 8) if symmetric else zeros
        scales = torch.rand(groups, generator=chance).mul(0.02).to(dtype)
        whole = (each.repeat_interleave(group, 1) for each in (zeros, scales.float()))
        weight.data.copy_((numbers - next(whole)) * next(whole))
        parts = packer(numbers, scales, zeros)
        stem = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{stem}.{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_quantisation(folder, settings)
    return model


def set_quantisation(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (64, False), (128, False)])
@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_the_checkpoint_in_blocks_or_not(
    tmp_path, method, group, symmetric
) -> None:
    model = write_checkpoint(tmp_path, method, group, symmetric)
    whole = load_decoder_only(tmp_path, "float32", "cpu")
    torch.testing.assert_close(whole.model(IDS).logits, model(IDS).logits)
    target = load_decoder_only(tmp_path, device="cpu")
    assert target.precision == ("Q4_0" if symmetric else "Q5_0")
    blocks, weights = blocks_in(target.model), dict(model.named_parameters())
    assert len(blocks) == 14
    for name, each in blocks.items():
        assert torch.equal(each.dequantised(torch.float32), weights[name])
    wanted = model(IDS).logits
    assert (target.model(IDS).logits - wanted).norm() < 0.1 * wanted.norm()


def test_scales_that_blocks_cannot_hold_leave_a_matrix_in_16_bits(tmp_path) -> None:
    write_checkpoint(tmp_path, "packed", 32, True, torch.float32)
    assert load_decoder_only(tmp_path, device="cpu").precision == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({**GPTQ, "desc_act": True}, "gptq with desc_act True"),
        ({**GPTQ, "bits": 8}, "gptq with bits 8"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "gptq with dynamic"),
        ({**AWQ, "version": "gemv"}, "awq with version 'gemv'"),
        (packed_settings(actorder="group"), "compressed-tensors with actorder 'group'"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path, settings, reason) -> None:
    write_checkpoint(tmp_path, "gptq", 32, True)
    set_quantisation(tmp_path, settings)
    with pytest.raises(UserError, match=f"the method {reason}"):
        load_decoder_only(tmp_path, device="cpu")


def test_what_has_no_place_is_refused_by_name(tmp_path) -> None:
    write_checkpoint(tmp_path, "gptq", 32, True)
    tensors = load_file(tmp_path / "model.safetensors")
    wrong = {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}
    save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.query is of size .* no product"):
        load_decoder_only(tmp_path, device="cpu")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack model\.norm\.weight"):
        load_decoder_only(tmp_path, device="cpu")
