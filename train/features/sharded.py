"""A target in pieces: each process holds its share of every decoder layer (FSDP2 of PyTorch).

A layer is gathered when it runs, so all processes make the same passes at the same time. Nothing
but layers is shared: heads read embeddings, norm and output head in every step.
"""

import torch
import torch.distributed as dist
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from drafthead.heads.target.placement import whole_weight
from drafthead.heads.target.target import Target


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
    """What the weights of a target take in this process, and what they would take whole."""
    weights = list(target.model.parameters())
    here = sum((w.to_local() if isinstance(w, DTensor) else w).nbytes for w in weights)
    return here, sum(weight.numel() * weight.itemsize for weight in weights)


def is_sharded(target: Target) -> bool:
    """Whether the passes of a target are those of all processes together."""
    return isinstance(target.model, FSDPModule)


def any_process(wants: bool, device: torch.device) -> bool:
    """Whether any process wants something; all processes must ask together."""
    flag = torch.tensor(int(wants), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
