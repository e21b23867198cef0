"""Products that read the same rows, as one: queries, keys and values, or gate and up.

A small product takes as long as a kernel takes to start. The weights of a layer's products are laid
side by side, each still the parameter that it was, and compiled layers multiply by all of them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from drafthead.backends.cuda.layer_arguments import UnlikeError

# Names of what reads the same rows, in the models of transformers.
GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# What reads the product of gate and up. For one row inductor computes that product again for each
# block of outputs; beyond so many inputs that takes longer than one more kernel.
READER, WIDE = "down_proj", 4096


def groups_in(layer: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The parts of a layer that have such products, by name, and the names of these."""
    for name, part in layer.named_modules():
        for group in GROUPS:
            parts = [getattr(part, each, None) for each in group]
            # Adapters and quantised weights are products of other classes.
            products = [each for each in parts if type(each) is nn.Linear]
            kinds = {(p.in_features, p.weight.dtype, p.bias is None) for p in products}
            if len(products) == len(group) and len(kinds) == 1:
                yield name, list(group)


def side_by_side(products: Sequence[nn.Linear], name: str) -> torch.Tensor | None:
    """The weights [sum of outputs, inputs] or biases of products as one tensor, which they share.

    They are moved where they do not lie so yet; None where the products have none.
    """
    parts = [getattr(each, name) for each in products]
    if parts[0] is None:
        return None
    first, sizes = parts[0], [len(part) for part in parts]
    shape = sum(sizes), *first.shape[1:]
    # Neighbours in memory may still be of different allocations, which no tensor reaches across.
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    wanted = [(storage, start + sum(sizes[:n]) * first[0].numel()) for n in range(len(parts))]
    found = [(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts]
    if found != wanted or not all(part.is_contiguous() for part in parts):
        together = torch.cat([part.detach() for part in parts])
        for part, moved in zip(parts, together.split(sizes), strict=True):
            part.data = moved
    return first.detach().as_strided(shape, torch.empty(shape, device="meta").stride())


class FirstOfGroup(nn.Module):
    """The first product of a group, which makes those of all."""

    def __init__(self, products: Sequence[nn.Linear]):
        """For products without numbers, on the meta device."""
        super().__init__()
        self.sizes = [each.out_features for each in products]
        self.weight = nn.Parameter(
            torch.cat(tuple(p.weight for p in products)), requires_grad=False
        )
        biases = tuple(each.bias for each in products if each.bias is not None)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.read: torch.Tensor | None = None
        self.made: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K]
        """The first product; the others are kept until `forget`."""
        self.read, self.made = x, linear(x, self.weight, self.bias).split(self.sizes, -1)
        return self.made[0]

    def forget(self) -> None:
        """Keep nothing: what stays would be a result of the compiled function."""
        self.read, self.made = None, ()


class LaterOfGroup(nn.Module):
    """Another product of a group."""

    def __init__(self, first: FirstOfGroup, place: int):
        super().__init__()
        self.group, self.place = [first], place  # in a list: it is no part of this one

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K]
        """The first product's output; raises UnlikeError where it has read something else."""
        if x is not self.group[0].read:
            raise UnlikeError("products of one group read different rows")
        return self.group[0].made[self.place]


@torch.library.custom_op("drafthead::in_memory", mutates_args={"x"})
def in_memory(x: torch.Tensor) -> None:
    """Nothing: an x [...] that may be written to is computed once, and then read from memory."""


class FromMemory(nn.Module):
    """A product whose input is computed before it, and not within it."""

    def __init__(self, product: nn.Linear):
        """For a product without numbers, on the meta device."""
        super().__init__()
        self.weight, self.bias = product.weight, product.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K]
        """The product."""
        in_memory(x)
        return linear(x, self.weight, self.bias)


class MergedProducts:
    """The groups of one kind of layer, in a copy without numbers that is to be compiled."""

    def __init__(self, form_alone: nn.Module):
        """Replaces the products of the copy."""
        self.groups = list(groups_in(form_alone))
        self.firsts: list[FirstOfGroup] = []
        for name, group in self.groups:
            part = form_alone.get_submodule(name)
            first = FirstOfGroup([getattr(part, each) for each in group])
            self.firsts.append(first)
            setattr(part, group[0], first)
            for place, each in enumerate(group[1:], start=1):
                setattr(part, each, LaterOfGroup(first, place))
            reader = getattr(part, READER, None)
            if type(reader) is nn.Linear and reader.in_features >= WIDE:
                setattr(part, READER, FromMemory(reader))

    def weights_of(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        """The parameters and buffers [...] of a layer of this kind, by the names in the copy."""
        weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        for name, group in self.groups:
            part, path = layer.get_submodule(name), f"{name}." if name else ""
            for kind in ("weight", "bias"):
                merged = side_by_side([getattr(part, each) for each in group], kind)
                for each in group:
                    weights.pop(f"{path}{each}.{kind}", None)
                if merged is not None:
                    weights[f"{path}{group[0]}.{kind}"] = merged
        return weights

    def forget(self) -> None:
        """Let go of what a call has made."""
        for first in self.firsts:
            first.forget()
