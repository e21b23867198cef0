"""Products of whole numbers of eight bits: weights by row, inputs by token.

Both are turned first, in blocks of 64 values, by a Hadamard matrix, which shares out the few large
values of a row and changes no product (QuaRot, Ashkboos et al. 2024). Sums of whole numbers are
exact, so a token's product depends on that token alone.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from drafthead.core.backend import kernel_of
from drafthead.core.errors import UserError
from drafthead.core.target import blocks
from drafthead.core.target.weight_state import weight_state

TURNED = 64  # values of a block
LONGEST = 2**16  # values of a row, whose sums still have 32 bits


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., K] times the Hadamard matrix without its factor of 1/8, float32, [..., K'].

    Zeros fill the last block. 1 2 0 0 would become, in blocks of four, 3 -1 3 -1.
    """
    values = functional.pad(x.float(), (0, -x.shape[-1] % TURNED))
    step = 1
    while step < TURNED:
        first, second = values.unflatten(-1, (-1, 2, step)).unbind(-2)
        values = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return values


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole numbers [..., K'], int8, of turned rows [..., K], and their scales [...]."""
    values = turned(x)
    numbers, scales = blocks.rounded(values, share=values.shape[-1])
    return numbers.to(torch.int8), scales[..., 0]


def product(
    x: torch.Tensor,  # [..., K]
    numbers: torch.Tensor,  # [N, K'] int8
    scales: torch.Tensor,  # [N], of which a 64th is taken, as both factors are turned
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """x weight^T + bias [..., N], in the type of x."""
    rows, their = rounded(x)
    sums = torch._int_mm(rows.flatten(0, -2), numbers.T)
    found = sums.unflatten(0, x.shape[:-1]).float() * (their[..., None] * (scales / TURNED))
    return (found if bias is None else found + bias.float()).to(x.dtype)


# By weights: their state, numbers and scales. Not in the modules, whose contents tell passes apart.
rounded_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Int8Linear(nn.Linear):
    """A product of whole numbers, made of the weights that it keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K]
        """The product [..., N]."""
        state, known = weight_state(self.weight), rounded_weights.get(self.weight)
        if known is None or known[0] != state:
            kernel = kernel_of("int8_rows") if self.weight.dtype == torch.bfloat16 else None
            known = rounded_weights[self.weight] = state, (kernel or rounded)(self.weight)
        numbers, scales = known[1]
        return product(x, numbers, scales, self.bias)


def forget_rounded(model: nn.Module) -> None:
    """Round the weights of a model anew, also where nothing tells that they have changed."""
    for part in model.modules():
        if isinstance(part, Int8Linear):
            rounded_weights.pop(part.weight, None)


def to_int8(model: nn.Module) -> None:
    """Make all matrix products of a model those of whole numbers.

    Raises UserError as `products_of`, and where rows are too long.
    """
    products = products_of(model, "int8")
    if long := [part for part in products.values() if part.in_features > LONGEST]:
        raise UserError(f"int8 sums up to {LONGEST} products, and {long[0]} has more: use bfloat16")
    for part in products.values():
        part.__class__ = Int8Linear  # in its place, with its weight, which others may share


def products_of(model: nn.Module, dtype: str) -> dict[str, nn.Linear]:
    """The matrix products of a model, which are to be of a type, by name.

    Raises UserError where most of its matrices are in modules that are none.
    """
    kinds = nn.Linear, Int8Linear
    parts: dict[str, Any] = dict(model.named_modules())
    products = {name: part for name, part in parts.items() if type(part) in kinds}
    others: dict[str, int] = {}
    for part in parts.values():
        if type(part) not in (*kinds, nn.Embedding):
            weights = [weight for weight in part.parameters(recurse=False) if weight.dim() > 1]
            name = type(part).__name__
            others[name] = others.get(name, 0) + sum(weight.numel() for weight in weights)
    if sum(others.values()) > sum(part.weight.numel() for part in products.values()):
        most = max(others, key=lambda name: others[name])
        raise UserError(
            f"{dtype} is for matrices of torch's Linear, and most of {type(model).__name__}'s are "
            f"in {most}: use bfloat16"
        )
    return products
