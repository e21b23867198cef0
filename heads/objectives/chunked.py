"""Losses over many logits, chunk by chunk: the gradient of a chunk is computed before the next one.

Logits of many positions over a large vocabulary do not fit in memory at once. Here the backward
pass of a chunk follows its forward pass, so that only one chunk's logits are in memory and none are
computed twice (as in Liger Kernel's fused losses, Hsu et al., 2024, arXiv 2410.10989).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**25  # float32 logits of a chunk: 128 MiB

# Of a part of a loss: the sum [] and, of each row, the losses and ranks [n, ...] without gradient.
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Maps a chunk of rows [n, ...] to the parts of its loss. The gradient of a part is computed before
# the next part begins.
Parts = Callable[..., Iterator[Part]]


def summed_in_chunks(
    parts: Parts,
    row_logits: int,
    parameters: Sequence[torch.Tensor],
    *rows: torch.Tensor,  # [R, ...]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The sum [] of all parts of all chunks, and of each part the losses and ranks [R, ...].

    A row has at most `row_logits` logits at once. `parameters` are those that `parts` may read; the
    sum has gradients for them and for `rows`.
    """
    size = max(1, MAX_LOGITS // row_logits)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # So DeepSpeed names parameters that ZeRO-3 has in pieces. It gathers them for each module, and
    # only its own hooks know when: there, chunks are computed again in the backward pass.
    if any(hasattr(parameter, "ds_id") for parameter in trained):
        total, *of_rows = _recomputed(parts, size, rows)
    else:
        total, *of_rows = _Summed.apply(parts, size, len(rows), *rows, *trained)
    return total, list(zip(of_rows[::2], of_rows[1::2], strict=True))


class _Summed(torch.autograd.Function):
    """The sum of all parts, whose gradients are known when it is."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, parts: Parts, size: int, num_rows: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The sum [], and losses and ranks [R, ...] of one part after the other."""
        wanted = ctx.needs_input_grad[3:]  # type: ignore[attr-defined]
        rows, parameters = tensors[:num_rows], tensors[num_rows:]
        gradients = _Gradients(wanted, num_rows)
        total = torch.zeros((), device=rows[0].device)
        of_chunks: list[list[torch.Tensor]] = []
        for chunk in zip(*(tensor.split(size) for tensor in rows), strict=True):
            leaves = [
                x.detach().requires_grad_(w) for x, w in zip(chunk, wanted[:num_rows], strict=True)
            ]
            of_chunks.append([])
            with torch.set_grad_enabled(any(wanted)):
                for part, losses, ranks in parts(*leaves):
                    gradients.add(part, [*leaves, *parameters])
                    total += part.detach()
                    of_chunks[-1] += [losses, ranks]
            gradients.end_chunk(leaves)
        ctx.gradients = gradients.of_inputs()  # type: ignore[attr-defined]
        of_rows = [torch.cat(column) for column in zip(*of_chunks, strict=True)]
        ctx.mark_non_differentiable(*of_rows)
        return total, *of_rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """The gradients that are there already, times that of the sum []."""
        of_sum = gradients[0]
        return None, None, None, *(g if g is None else g * of_sum for g in ctx.gradients)


class _Gradients:
    """Sums of gradients over parts: for rows chunk by chunk, for parameters over all."""

    def __init__(self, wanted: Sequence[bool], num_rows: int):
        self.wanted, self.num_rows = wanted, num_rows
        self.sums: list[torch.Tensor | None] = [None] * len(wanted)
        self.of_chunks: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]

    def add(self, part: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Add the gradients of one part; what it was computed with can be forgotten then."""
        places = [place for place, wanted in enumerate(self.wanted) if wanted]
        if not places or not part.requires_grad:
            return
        found = torch.autograd.grad(part, [sources[place] for place in places], allow_unused=True)
        for place, gradient in zip(places, found, strict=True):
            if gradient is not None:
                before = self.sums[place]
                self.sums[place] = gradient if before is None else before + gradient

    def end_chunk(self, leaves: Sequence[torch.Tensor]) -> None:
        """Keep the gradients of a chunk's rows [n, ...]."""
        for place, leaf in enumerate(leaves):
            if self.wanted[place]:
                found = self.sums[place]
                self.of_chunks[place].append(torch.zeros_like(leaf) if found is None else found)
                self.sums[place] = None

    def of_inputs(self) -> list[torch.Tensor | None]:
        """Of all rows and then of all parameters; None where there is none."""
        of_rows = [torch.cat(chunks) if chunks else None for chunks in self.of_chunks]
        return [*of_rows, *self.sums[self.num_rows :]]


def _recomputed(parts: Parts, size: int, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The sum [], and losses and ranks [R, ...] of one part after the other."""

    def in_a_row(*chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = list(parts(*chunk))
        return torch.stack([part for part, *_ in found]).sum(), *(x for _, *xs in found for x in xs)

    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    sums, *of_rows = zip(
        *(checkpoint(in_a_row, *chunk, use_reentrant=False) for chunk in chunks), strict=True
    )
    return torch.stack(sums).sum(), *(torch.cat(column) for column in of_rows)
