"""Rounding a loaded model's matrix products to whole numbers of 8 or 4 bits."""

from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.block_modules import Int4Linear
from drafthead.core.target.blocks import GROUP, Blocks
from drafthead.core.target.int8 import LONGEST, Int8Linear


def to_int8(model: nn.Module) -> None:
    """Make all matrix products of a model those of whole numbers.

    Raises UserError as `products_of`, and where rows are too long.
    """
    products = products_of(model, "int8")
    if long := [part for part in products.values() if part.in_features > LONGEST]:
        raise UserError(f"int8 sums up to {LONGEST} products, and {long[0]} has more: use bfloat16")
    for part in products.values():
        part.__class__ = Int8Linear  # in its place, with its weight, which others may share


def to_int4(model: PreTrainedModel) -> None:
    """Make the matrix products of a model those of blocks of 4 bits, and its output head's of 8.

    Rows that are no whole blocks stay as they are. Raises UserError as `products_of`.
    """
    head = model.get_output_embeddings()
    for name, part in products_of(model, "int4").items():
        if part.in_features % GROUP == 0:
            blocks = Blocks.rounded(part.weight, "Q8_0" if part is head else "Q4_1")
            model.set_submodule(name, Int4Linear(blocks, part.bias))


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
