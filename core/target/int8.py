"""Products of whole numbers of eight bits: weights by row, inputs by token.

Both are turned first, in blocks of 64 values, by a Hadamard matrix, which shares out the few large
values of a row and changes no product (QuaRot, Ashkboos et al. 2024). Sums of whole numbers are
exact, so a token's product depends on that token alone.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from drafthead.core.backend import kernel_of
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
