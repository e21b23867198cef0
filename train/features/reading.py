"""Reads the frozen target's features for packed rows.

Packing changes no feature: attention stays inside a segment, where positions start from 0.

Several processes may share a target, each with its part of every decoder layer (FSDP2 of PyTorch).
A layer is gathered when it runs, so all processes make the same passes at the same time. Nothing
but layers is shared: heads read embeddings, norm and output head in every step.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import NO_FEATURES, Features, FeatureSpec
from drafthead.core.target.placement import WHOLE, Placement, whole_weight
from drafthead.core.target.target import Target
from drafthead.heads.layers.segments import positions_in_segments, segment_mask
from drafthead.heads.layers.tiled_attention import TiledAttention
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.infer.engine.prefill import rows_of_passes
from drafthead.train.data.packing import PackedData
from drafthead.train.features.kept import KeptFeatures, of_row, padded
from drafthead.train.settings import TargetConfig

logger = logging.getLogger(__name__)


def load_target(
    config: TargetConfig,
    mixed_precision: str,
    max_length: int,
    device: torch.device,
    processes: int = 1,
) -> Target:
    """Load the target and check that it can run rows of `max_length` tokens.

    All processes call this together. Raises UserError when it cannot be loaded or placed, or its
    context is shorter than a row.
    """
    # `auto` is float32 without bf16 training.
    dtype = "float32" if config.dtype == "auto" and mixed_precision == "no" else config.dtype
    placement = placement_of(config, processes)
    target = load_decoder_only(config.name, dtype, str(device), config.trust_code, placement)
    check_row_length(target, config.name, max_length)
    if config.placement == "fsdp":
        shard_layers(target, device)
        here, whole = weight_bytes(target)
        logger.info("each process holds %.3g of the target's %.3g GB", here / 1e9, whole / 1e9)
    return target


def placement_of(config: TargetConfig, processes: int) -> Placement:
    """The map of layers to devices; UserError for a placement not for so many processes."""
    if config.placement == "whole":
        return WHOLE
    if config.placement != "fsdp":
        if processes > 1:
            raise UserError(
                f"target.placement={config.placement} is for one process, which uses all devices, "
                f"and there are {processes}: use fsdp or whole, or launch one process"
            )
        return Placement(config.placement, config.memory, config.offload_folder)
    if processes == 1:
        raise UserError(
            "target.placement=fsdp shares the target among processes, and this is one alone: "
            "launch several with accelerate launch, or use auto or whole"
        )
    folder = config.offload_folder and f"{config.offload_folder}/process-{dist.get_rank()}"
    return Placement("disk", offload_folder=folder)


def check_row_length(target: Target, name: str, max_length: int) -> None:
    """Raise UserError when rows of `max_length` tokens are longer than the target's context."""
    if target.max_length is not None and max_length > target.max_length:
        raise UserError(
            f"data.max_length is {max_length}, but {name} has {target.max_length} positions"
        )


def computing_in(mixed_precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The one rule of number types: with `bf16`, products are computed in bfloat16.

    It holds whatever types weights and inputs have. DDP leaves both in float32, DeepSpeed casts the
    head's weights and FSDP its inputs as well; none of them casts what the target has stored.
    """
    if mixed_precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def read_features(
    target: Target, tokens: HeadBatch, spec: FeatureSpec, mixed_precision: str
) -> HeadBatch:
    """Run the target over packed rows [B, T] for what the head reads, if it is anything."""
    tokens = tokens.to(target.device)
    if spec == NO_FEATURES:
        return tokens
    # A 16-bit target runs as in decoding; autocast is only for a float32 target.
    casts = mixed_precision == "bf16" and target.dtype == torch.float32
    device, precision = target.device, mixed_precision if casts else "no"
    with TiledAttention(device), computing_in(precision, device):
        if target.stateful_layers is not None:
            features = read_alone(target, tokens, spec)
        else:
            features = target.read(
                tokens.input_ids,
                positions_in_segments(tokens.segments),
                segment_mask(tokens.segments, torch.bfloat16 if casts else target.dtype),
                spec,
            )
    return replace(tokens, features=features)


def read_alone(target: Target, tokens: HeadBatch, spec: FeatureSpec) -> Features:
    """The features [B, T, D] of packed rows, each segment a row of its own: no mask keeps running
    states of segments apart.

    Segments of similar length are read together. Padding comes last, where no token looks.
    """
    rows, places = tokens.segments.nonzero(as_tuple=True)
    positions = positions_in_segments(tokens.segments)[rows, places]
    segments = (positions == 0).cumsum(0) - 1  # of each token, counted over all rows
    lengths = segments.bincount()
    tables: list[torch.Tensor] | None = None
    for group in rows_of_passes(lengths, alone=False):
        numbers = torch.tensor(group, device=rows.device)
        new = torch.full_like(lengths, -1)
        new[numbers] = torch.arange(len(group), device=rows.device)
        here = new[segments] >= 0  # tokens that this pass reads
        at, there = (new[segments][here], positions[here]), (rows[here], places[here])
        ids = tokens.input_ids.new_zeros(len(group), int(lengths[numbers].max()))
        ids[at] = tokens.input_ids[there]
        steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        found = target.read(ids, steps, None, spec)
        states = [*found.taps, *([] if found.last is None else [found.last])]
        shape = tokens.segments.shape
        tables = tables or [each.new_zeros(*shape, each.shape[-1]) for each in states]
        for table, each in zip(tables, states, strict=True):
            table[there] = each[at]
    assert tables is not None
    return Features(tables.pop() if spec.last else None, tuple(tables))


@dataclass(frozen=True)
class FeatureReader:
    """The batches of one data set, with the features of a target."""

    target: Target
    data: PackedData
    spec: FeatureSpec
    mixed_precision: str
    kept: KeptFeatures | None = None  # where features are looked up before the target runs

    def batch(self, rows: Sequence[int]) -> HeadBatch:
        """The given rows [B, T] of the data set."""
        tokens = self.data.batch(rows)
        if self.kept is None:
            return read_features(self.target, tokens, self.spec, self.mixed_precision)
        # What is kept is computed apart from what is not, in each epoch: else a run that goes on
        # would round some rows in other batches than the run that was stopped.
        kept = [row for row in rows if row < self.kept.rows]
        others = [row for row in rows if row >= self.kept.rows]
        found = dict(zip(kept, self._kept(self.kept, kept), strict=True))
        found |= dict(zip(others, self._computed(others), strict=True))
        device = self.target.device
        features = padded([found[row].map(lambda x: x.to(device)) for row in rows])
        return replace(tokens.to(device), features=features)

    def _kept(self, kept: KeptFeatures, rows: Sequence[int]) -> list[Features]:
        """The features [T, D] of each row as they are kept; computed if one is missing."""
        read = [kept.read(row) for row in rows]
        found = [features for features in read if features is not None]
        missing = rows if len(found) < len(rows) else []
        computed = self._computed(missing)
        for row, features in zip(missing, computed, strict=True):
            kept.write(row, features)
        return computed or found

    def _computed(self, rows: Sequence[int]) -> list[Features]:
        """The features [T, D] of each row, of one pass of the target over all.

        Of a target in pieces a process also makes the pass that only another one needs.
        """
        wanted = bool(rows)
        if isinstance(self.target.model, FSDPModule):  # whose passes are those of all processes
            wanted = any_process(wanted, self.target.device)
        if not wanted:
            return []
        tokens = self.data.batch(rows or [0])
        batch = read_features(self.target, tokens, self.spec, self.mixed_precision).features
        return [of_row(batch, i, self.data.row_length(row)) for i, row in enumerate(rows)]


def shard_layers(target: Target, device: torch.device) -> None:
    """Share the layers of a target, loaded with all of them on disk, among all processes.

    Each process reads a layer, keeps its share and goes on to the next, so it never holds more than
    its shares and a layer.
    """
    model = target.model
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = set(target.layers.children())
    for path, module in list(model.named_modules()):
        if module in layers:
            _bring(model, path, module, device)
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    remove_hook_from_module(model, recurse=True)
    around = {weight for weight in model.parameters() if not isinstance(weight, DTensor)}
    # The root lets a GPU gather the next layer while one runs.
    fully_shard(model, mesh=mesh, ignored_params=around)


def _bring(model: PreTrainedModel, path: str, layer: nn.Module, device: torch.device) -> None:
    """Read the weights of a layer that is on disk."""
    names = [name for name, weight in layer.named_parameters() if weight.is_meta]
    weights = {
        name: whole_weight(model, f"{path}.{name}", layer.get_parameter(name)) for name in names
    }
    remove_hook_from_module(layer, recurse=True)
    for name, weight in weights.items():
        set_module_tensor_to_device(layer, name, device, value=weight)


def weight_bytes(target: Target) -> tuple[int, int]:
    """Return what the weights of a target take in this process, and what they would take whole."""
    weights = list(target.model.parameters())
    here = sum((w.to_local() if isinstance(w, DTensor) else w).nbytes for w in weights)
    return here, sum(weight.numel() * weight.itemsize for weight in weights)


def any_process(wants: bool, device: torch.device) -> bool:
    """Tell whether any process wants something; all processes must ask together."""
    flag = torch.tensor(int(wants), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
