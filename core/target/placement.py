"""The places of a target's decoder layers: on the device of its inputs, on others, or on disk.

Embeddings, final norm and output head stay on the device of the inputs: heads read them in every
step, outside of the model's own passes. accelerate brings the inputs of other layers to them, and
layers out of memory or off the disk when they run.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_max_memory
from torch import nn
from torch.distributed import is_torchelastic_launched
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, DistributedConfig
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.architecture import find_decoder, find_layers

logger = logging.getLogger(__name__)

Device = int | str  # the number of a GPU, `cpu` or `disk`
FREE_SHARE = 0.8  # of a GPU's free memory is for layers, where no limit is given


@dataclass(frozen=True)
class Placement:
    """The wanted places of decoder layers.

    `layers` is `whole` (all of the target on the device of its inputs), `cpu` or `disk` for all,
    `auto`, `tensor` (a part of each matrix in each process that torchrun has started), or the
    device of each by its name, as in transformers' device maps; those that a map does not name are
    on the device of the inputs. `memory` limits what `auto` uses of each device,
    in bytes or as `20GB`. Layers on disk are read from the model's own files. Where these hold
    other tensors than the model (its experts are joined, or they are not safetensors), the layers
    are first written to `offload_folder`.
    """

    layers: str | Mapping[str, Device] = "whole"
    memory: Mapping[Device, Device] | None = None
    offload_folder: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of the target is on the device of its inputs."""
        return self.layers == "whole"

    def loading_options(
        self, auto_class: Any, source: str | Path, dtype: Any, device: torch.device, trust: bool
    ) -> dict[str, Any]:
        """The arguments of `from_pretrained` for it; `device` is that of the inputs.

        Raises UserError for a device that this machine lacks, and for a module that is no layer.
        """
        if self.is_whole:
            return {}
        if self.layers == "tensor":
            if not is_torchelastic_launched():
                raise UserError(
                    "the placement `tensor` is for processes that share a target: start them with "
                    "`torchrun --nproc-per-node 2 SCRIPT`"
                )
            return {"distributed_config": DistributedConfig(tp_plan="auto")}
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(f"{source} is quantised, and layers of such targets cannot be placed")
        dtype = None if dtype == "auto" else dtype
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust)
        return {
            "device_map": self.device_map(model, device),
            "offload_folder": self.offload_folder,
        }

    def device_map(self, model: PreTrainedModel, device: torch.device) -> dict[str, Device]:
        """The device of each part of a model, whose inputs are on `device`."""
        layers = find_layers(find_decoder(model))
        path = next(name for name, module in model.named_modules() if module is layers)
        here = named(device)
        if self.layers == "auto":
            placed = self._automatic(layers, here, bytes_of(model) - bytes_of(layers))
        elif isinstance(self.layers, str):
            check_device(self.layers, "its placement")
            placed = {name: self.layers for name, _ in layers.named_children()}
        else:
            placed = self._given(self.layers, layers, path, here)
        around = dict.fromkeys(names_around(model, path), here)
        return around | {f"{path}.{name}": place for name, place in placed.items()}

    def _automatic(self, layers: nn.Module, here: Device, around: int) -> dict[str, Device]:
        """The device of each layer by its number: those of the inputs first, disk last.

        `around` is what the rest of the model takes, in bytes.
        """
        for device in self.memory or ():
            check_device(device, "its memory")
        try:
            memory = get_max_memory(None if self.memory is None else dict(self.memory))
        except ValueError as error:  # of a size
            raise UserError(f"the target's memory cannot be read: {error}") from error
        if self.memory is None:
            memory = {d: n if d == "cpu" else int(FREE_SHARE * n) for d, n in memory.items()}
        if here in memory:
            memory[here] = max(0, memory[here] - around)
        kinds = sorted({type(layer).__name__ for layer in layers.children()})
        placed = infer_auto_device_map(layers, memory, kinds, clean_result=False)
        counts = Counter(placed.values())
        logger.info(
            "decoder layers: %s", ", ".join(f"{n} on {where}" for where, n in counts.items())
        )
        return placed

    def _given(
        self, given: Mapping[str, Device], layers: nn.Module, path: str, here: Device
    ) -> dict[str, Device]:
        """The device of each layer by its number, of a map with their names."""
        numbers = [name for name, _ in layers.named_children()]
        for name, device in given.items():
            if name not in {path, *(f"{path}.{number}" for number in numbers)}:
                raise UserError(
                    f"the target's placement names {name!r}, which is not a decoder layer: those "
                    f"are {path}.{numbers[0]} to {path}.{numbers[-1]}, or {path} for all; the rest "
                    "is read by the head in every step, on the device of the inputs"
                )
            check_device(device, "its placement")
        rest = given.get(path, here)
        return {number: given.get(f"{path}.{number}", rest) for number in numbers}


WHOLE = Placement()


def named(device: torch.device) -> Device:
    """A torch device as device maps call it; `cuda` is the current GPU."""
    if device.type == "cpu":
        return "cpu"
    return torch.accelerator.current_device_index() if device.index is None else device.index


def check_device(device: Device, setting: str) -> None:
    """Raise UserError, naming the setting, for a device that this machine lacks."""
    known = [*range(torch.accelerator.device_count()), "cpu", "disk"]
    if device not in known:
        raise UserError(
            f"the target cannot be placed: {setting} names the device {device!r}, and this machine "
            f"has {', '.join(map(str, known))}"
        )


def bytes_of(module: nn.Module) -> int:
    """The memory in bytes that the weights of a module take."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def names_around(model: nn.Module, path: str) -> list[str]:
    """Names of modules and tensors that together are all of a model but the module at `path`.

    Around `model.layers` these are `model.embed_tokens`, `model.norm`, `lm_head` and the like.
    """
    names: list[str] = []
    module, prefix = model, ""
    for step in path.split("."):
        own = (module.named_children(), module.named_parameters(recurse=False))
        buffers = module.named_buffers(recurse=False)
        names += [prefix + name for part in (*own, buffers) for name, _ in part if name != step]
        module, prefix = module.get_submodule(step), f"{prefix}{step}."
    return names


def whole_weight(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The value [...] of a tensor in a model's `state_dict`, wherever it is.

    Of a layer that is elsewhere it is read again, on the CPU or the device of the inputs. Of one in
    pieces all processes get it together, so all must call this, in the same order.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return load_offloaded_parameter(model, name) if tensor.is_meta else tensor
