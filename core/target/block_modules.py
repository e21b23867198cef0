"""Products and embeddings whose weights stay in blocks."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D  # the matrices of GPT-2, inputs first

from drafthead.core.backend import kernel_of
from drafthead.core.target.blocks import Blocks, product


class InBlocks(nn.Module):
    """A module with a matrix in blocks, whose bytes are its `weight`."""

    weight: torch.Tensor  # [N, bytes of a row] uint8

    def __init__(self, blocks: Blocks):
        """The bytes are shared, not copied."""
        super().__init__()
        self.kind = blocks.kind
        self.register_buffer("weight", blocks.raw, persistent=False)

    @property
    def blocks(self) -> Blocks:
        """The matrix."""
        return Blocks(self.kind, self.weight)


class BlockLinear(InBlocks):
    """A product by a matrix in blocks."""

    def __init__(self, blocks: Blocks, bias: nn.Parameter | None):
        """For a matrix [N, K] and a bias [N]."""
        super().__init__(blocks)
        self.out_features, self.in_features = blocks.shape
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., K]
        """The product [..., N]; one that has a gradient rounds no inputs."""
        if x.requires_grad:
            return linear(x, self.blocks.dequantised(x.dtype), self.bias)
        if x.dtype == torch.bfloat16 and (kernel := kernel_of("in_blocks")):
            made: torch.Tensor = kernel(x, self.weight, self.kind, self.bias)
            return made
        return product(x, self.blocks, self.bias)


class Int4Linear(BlockLinear):
    """A product by a matrix that was rounded to blocks while it was loaded."""


class BlockEmbedding(InBlocks):
    """A table in blocks, whose rows are dequantised where they are looked up."""

    def __init__(self, blocks: Blocks, like: nn.Embedding):
        """In the type of a module of the same size, and with its factor where it has one."""
        super().__init__(blocks)
        self.num_embeddings, self.embedding_dim = blocks.shape
        self.dtype = like.weight.dtype
        self.scale: Any = getattr(like, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [...]
        """Their rows [..., D]."""
        rows = self.blocks.rows(ids).to(self.dtype)
        return rows if self.scale is None else rows * torch.as_tensor(self.scale).to(self.dtype)


def blocks_in(model: nn.Module) -> dict[str, Blocks]:
    """The matrices in blocks of a model, by the names that they would have as parameters."""
    parts = model.named_modules()
    return {f"{name}.weight": part.blocks for name, part in parts if isinstance(part, InBlocks)}


def kinds_of(model: nn.Module) -> str:
    """The kinds of blocks that a model has, that of most weights first; empty where it has none."""
    sizes: Counter[str] = Counter()
    for blocks in blocks_in(model).values():
        sizes[blocks.kind] += blocks.raw.nbytes
    return "+".join(kind for kind, _ in sizes.most_common())


def keeps_blocks(module: nn.Module) -> bool:
    """Whether a module of torch computes what one with blocks in its place would."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return type(module) in (nn.Linear, Conv1D, nn.Embedding) or scaled


def put_blocks(model: nn.Module, name: str, blocks: Blocks) -> None:
    """Let a module of which `keeps_blocks` holds read blocks."""
    module: Any = model.get_submodule(name)
    of_rows = isinstance(module, nn.Embedding)
    made = BlockEmbedding(blocks, module) if of_rows else BlockLinear(blocks, module.bias)
    model.set_submodule(name, made)
