"""Checkpoints of the hub with 4 bits by group, read into blocks: GPTQ, AWQ, compressed-tensors.

A weight is scale * (number - zero), with a scale and a zero for each group of a row. Where all
zeros are 8 that is a block of Q4_0; the difference of others has five bits, as in Q5_0.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from drafthead.core.errors import UserError
from drafthead.core.target.block_modules import put_blocks
from drafthead.core.target.blocks import GROUP, Blocks
from drafthead.core.target.scaled_weights import numbers_in
from drafthead.core.target.weight_types import method_of, wrongly_read

EIGHT = 8  # numbers of 4 bits in a word; and the zero of signed ones
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word of AWQ has the numbers of columns 0 to 7
SAMPLED = 2  # rows that are compared with what the checkpoint says
TINY = 2.0**-24  # between scales of 16 bits that are next to 0
Tensors = Mapping[str, torch.Tensor]


class Groups(NamedTuple):
    """A matrix of numbers from 0 to 15, of which a group shares scale and zero."""

    numbers: torch.Tensor  # [N, K] int32
    scales: torch.Tensor  # [N, K / group]
    zeros: torch.Tensor  # [N, K / group] int32

    @property
    def weights(self) -> torch.Tensor:
        """The weights [N, K] that it stands for, float32."""
        size = self.numbers.shape[1] // self.scales.shape[1]
        zeros, scales = (each.repeat_interleave(size, 1) for each in (self.zeros, self.scales))
        return (self.numbers - zeros) * scales.float()


def gptq(settings: dict[str, Any], of: Tensors) -> Groups:
    """Words [K / 8, N], and [groups, N / 8] for zeros, which version 1 stores less 1."""
    numbers = numbers_in(of["qweight"]).mT.flatten(0, 1)  # [K, N]
    if "g_idx" in of and (of["g_idx"].diff() < 0).any():
        raise UserError("GPTQ with desc_act is not read here: its groups are of no neighbours")
    zeros = numbers_in(of["qzeros"]).flatten(1)
    if (settings.get("checkpoint_format") or settings.get("format")) != "gptq_v2":
        zeros = zeros + 1 & 15
    return Groups(numbers.T, of["scales"].T, zeros.T)


def awq(_: dict[str, Any], of: Tensors) -> Groups:
    """Words [K, N / 8] across the outputs, in an order of their own."""
    numbers, zeros = (numbers_in(of[n])[..., AWQ_ORDER].flatten(1) for n in ("qweight", "qzeros"))
    return Groups(numbers.T, of["scales"].T, zeros.T)


def packed(_: dict[str, Any], of: Tensors) -> Groups:
    """Words [N, K / 8] across the inputs, and [N / 8, groups] for zeros."""
    scales = of["weight_scale"]
    zeros = torch.full(scales.shape, EIGHT, dtype=torch.int32)
    if "weight_zero_point" in of:
        zeros = numbers_in(of["weight_zero_point"]).mT.flatten(0, 1)[: len(scales)]
    return Groups(
        numbers_in(of["weight_packed"]).flatten(1)[:, : of["weight_shape"][1]], scales, zeros
    )


class GroupLayout(NamedTuple):
    """A method's form of a matrix: the endings of its tensors, the first its numbers."""

    endings: tuple[str, ...]
    read: Callable[[dict[str, Any], Tensors], Groups]


LAYOUTS = {
    "gptq": GroupLayout(("qweight", "qzeros", "scales", "g_idx"), gptq),
    "awq": GroupLayout(("qweight", "qzeros", "scales"), awq),
    "compressed-tensors": GroupLayout(
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"), packed
    ),
}


def settings_of(config: PreTrainedConfig | None) -> dict[str, Any] | None:
    """A configuration's settings of weights that can be read here; None for other weights."""
    settings = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict) or method_of(settings) not in LAYOUTS:
        return None
    if method_of(settings) != "compressed-tensors":
        return settings
    # Packed integers of other sizes and groups are read as bfloat16, see `scaled_weights`.
    groups = [each.get("weights") or {} for each in settings.get("config_groups", {}).values()]
    packed = settings.get("format", "pack-quantized") == "pack-quantized"
    fit = [g.get("num_bits") == 4 and (g.get("group_size") or 32) % 32 == 0 for g in groups]
    return settings if packed and all(fit) else None


def check_settings(settings: dict[str, Any], name: str | Path) -> None:
    """Raise UserError, with the setting, for a form of a method that is not read here."""
    groups = [each["weights"] for each in settings.get("config_groups", {}).values()]
    for of in groups or [settings]:
        known: dict[str, tuple[Any, ...]] = {
            "bits": (4,), "w_bit": (4,), "num_bits": (4,), "type": ("int",), "desc_act": (False,),
            "version": ("gemm",), "strategy": ("group", "channel"), "dynamic": (False, None, {}),
            "actorder": (None, "static", "weight"),
        }  # fmt: skip
        for key, able in known.items():
            if key in of and of[key] not in able:
                raise UserError(
                    f"{name} has weights of the method {method_of(settings)} with {key} "
                    f"{of[key]!r}, which is not read here, but {able[0]!r}: use another version"
                )


def load(
    source: str | Path,
    model_class: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    trust_code: bool,
) -> PreTrainedModel:
    """The model of a folder or hub id that `settings_of` knows, with weights of a type; for None
    in blocks, and between them bfloat16.

    Raises UserError for a matrix that is not in groups of 4 bits, and for what has no place.
    """
    settings = config.quantization_config
    check_settings(settings, source)
    del config.quantization_config
    layout, unread = LAYOUTS[method_of(settings)], []
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = model_class.from_config(
            config, dtype=dtype or torch.bfloat16, trust_remote_code=trust_code
        )
    with ExitStack() as stack:
        files = opened(source, stack)
        for name in tqdm(files, desc=f"reading {source}", delay=3, leave=False):
            stem, _, ending = name.rpartition(".")
            if ending == layout.endings[0]:
                names = {end: f"{stem}.{end}" for end in layout.endings}
                of = {end: files[n].get_tensor(n) for end, n in names.items() if n in files}
                groups = layout.read(settings, of)
                put_groups(model, stem, groups, dtype, source)
            elif ending not in layout.endings and not put(model, name, files[name]):
                unread.append(name)
    model.tie_weights()
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if reason := wrongly_read(model, unread, missing):
        raise UserError(f"cannot load the model {source}: {reason}")
    with suppress(OSError):  # not every model has such a file
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def opened(source: str | Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor of a folder or hub id; UserError for other files."""
    missing = {"_raise_exceptions_for_missing_entries": False}
    names = [SAFE_WEIGHTS_NAME]
    if (index := cached_file(str(source), SAFE_WEIGHTS_INDEX_NAME, **missing)) is not None:
        names = sorted(
            {*json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()}
        )
    found: dict[str, Any] = {}
    for name in names:
        if (path := cached_file(str(source), name, **missing)) is None:
            raise UserError(f"cannot load the model {source}: it has no {name}")
        file = stack.enter_context(safe_open(path, "pt"))
        found |= dict.fromkeys(file.keys(), file)
    return found


def put(model: nn.Module, name: str, file: Any) -> bool:
    """Give a weight its values, and tell whether the model has it; UserError for another size."""
    stem, _, ending = name.rpartition(".")
    own = dict(model.named_parameters()).get(name)
    if own is None:
        return False
    values = file.get_tensor(name).to(own.dtype)
    if values.shape != own.shape:
        raise UserError(f"{name} is of size {[*values.shape]}, and the model's {[*own.shape]}")
    setattr(model.get_submodule(stem), ending, nn.Parameter(values, requires_grad=False))
    return True


def put_groups(
    model: nn.Module, name: str, groups: Groups, dtype: torch.dtype | None, source: str | Path
) -> None:
    """Let a product read a matrix, in blocks for the type None.

    Raises UserError for what is no product of its size, for groups that are not of whole blocks,
    and where blocks are not what the checkpoint says.
    """
    module: Any = dict(model.named_modules()).get(name)
    shape = tuple(groups.numbers.shape)
    if type(module) is not nn.Linear or shape != (module.out_features, module.in_features):
        raise UserError(
            f"cannot load the model {source}: {name} is of size {list(shape)} in 4 bits, and there "
            f"is no product of that size, but {module}"
        )
    if shape[1] % (GROUP * groups.scales.shape[1]):
        raise UserError(f"cannot load the model {source}: {name} has groups of no whole blocks")
    if dtype is None and (blocks := in_blocks(groups)) is not None:
        rows = torch.linspace(0, shape[0] - 1, SAMPLED).long()
        expected = Groups(*(part[rows] for part in groups)).weights
        if not torch.allclose(blocks.rows(rows), expected, rtol=0, atol=16 * TINY):
            raise UserError(f"cannot load the model {source}: {name} is not the same in blocks")
        put_blocks(model, name, blocks)
        return
    values = groups.weights.to(module.weight.dtype)
    module.weight = nn.Parameter(values, requires_grad=False)


def in_blocks(groups: Groups) -> Blocks | None:
    """The weights in blocks; None where their scales are not numbers of 16 bits."""
    (rows, inputs), scales = groups.numbers.shape, groups.scales.half()
    if not ((scales.float() - groups.scales.float()).abs() <= TINY).all():
        return None
    kind, zero = ("Q4_0", 8) if (groups.zeros == EIGHT).all() else ("Q5_0", 16)
    size = inputs // scales.shape[1]
    above = groups.numbers - groups.zeros.repeat_interleave(size, 1) + zero
    values = above.to(torch.uint8).view(rows, -1, GROUP)
    factors = scales.repeat_interleave(size // GROUP, 1).view(torch.uint8).view(rows, -1, 2)
    fifth = (values >> 4).unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)
    bits = [] if zero == EIGHT else [fifth.sum(-1, dtype=torch.uint8)]
    low, high = (values & 15).split(GROUP // 2, dim=-1)
    return Blocks(kind, torch.cat([factors, *bits, low | high << 4], dim=-1).flatten(1))
