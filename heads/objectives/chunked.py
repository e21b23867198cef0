"""Losses over many logits, chunk by chunk: the gradient of a chunk is computed before the next one.

Logits of many positions over a large vocabulary do not fit in memory at once. Here the backward
pass of a chunk follows its forward pass, so that only one chunk's logits are in memory and none are
computed twice (as in Liger Kernel's fused losses, Hsu et al., 2024, arXiv 2410.10989).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**25  # float32 logits of a chunk: 128 MiB

# A part of a loss: the sum [] that is trained and, for each row, losses and ranks [n, ...].
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Maps a chunk of rows [n, ...] to the parts of its loss. The gradient of a part is computed before
# the next part begins.
Parts = Callable[..., Iterator[Part]]
# Maps rows [R, ...] to the sum [] of all parts of all chunks, which has gradients, and to the
# losses and ranks [R, ...] of each part, which have none.
Summed = Callable[..., tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]


def in_chunks(row_logits: int, parameters: Iterable[torch.Tensor]) -> Callable[[Parts], Summed]:
    """Decorates a loss so that it is computed for a few rows at a time, with its gradients.

    A row has at most `row_logits` logits at once. The loss may read no other `parameters` [...];
    its sum has gradients for them and for the rows.
    """
    size = max(1, MAX_LOGITS // row_logits)
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def decorated(parts: Parts) -> Summed:
        """The loss of which `parts` gives the parts, chunk by chunk."""

        def summed(
            *rows: torch.Tensor,  # [R, ...]
        ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
            """The sum [] of all parts of all chunks; losses and ranks [R, ...] of each part."""
            # So DeepSpeed names parameters that ZeRO-3 has in pieces. It gathers them for each
            # module, and only its own hooks know when: there, chunks are computed again in the
            # backward pass.
            if any(hasattr(parameter, "ds_id") for parameter in trained):
                total, *of_rows = _recomputed(parts, size, rows)
            else:
                tensors = [*rows, *trained]
                # `forward` cannot tell: torch always calls it without gradients.
                if not torch.is_grad_enabled():
                    tensors = [tensor.detach() for tensor in tensors]
                total, *of_rows = _Summed.apply(parts, size, len(rows), *tensors)
            return total, list(zip(of_rows[::2], of_rows[1::2], strict=True))

        return summed

    return decorated


class _Summed(torch.autograd.Function):
    """The sum of all parts, whose gradients are known when it is."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, parts: Parts, size: int, num_rows: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The sum [], and losses and ranks [R, ...] of one part after the other."""
        wanted = ctx.needs_input_grad[3:]  # type: ignore[attr-defined]
        rows, parameters = tensors[:num_rows], tensors[num_rows:]
        of_rows = [torch.zeros_like(x) if w else None for x, w in zip(rows, wanted, strict=False)]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        total = torch.zeros((), device=rows[0].device)
        of_chunks: list[list[torch.Tensor]] = []
        # An empty batch is one chunk of no rows.
        for start in range(0, max(1, len(rows[0])), size):
            chunk = slice(start, start + size)
            leaves = [
                x[chunk].detach().requires_grad_(w) for x, w in zip(rows, wanted, strict=False)
            ]
            gradients = [None] * num_rows + sums
            of_chunks.append([])
            with torch.set_grad_enabled(any(wanted)):
                for part, losses, ranks in parts(*leaves):
                    _add_gradients(part, [*leaves, *parameters], gradients)
                    total += part.detach()
                    of_chunks[-1] += [losses.detach(), ranks]
            sums = gradients[num_rows:]
            for whole, gradient in zip(of_rows, gradients, strict=False):
                if whole is not None and gradient is not None:
                    whole[chunk] = gradient
        ctx.gradients = [*of_rows, *sums]  # type: ignore[attr-defined]
        known = [torch.cat(column) for column in zip(*of_chunks, strict=True)]
        ctx.mark_non_differentiable(*known)
        return total, *known

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """The gradients that are there already, times that of the sum []."""
        of_sum = gradients[0]
        return None, None, None, *(g if g is None else g * of_sum for g in ctx.gradients)


def _add_gradients(
    part: torch.Tensor,  # []
    sources: Sequence[torch.Tensor],
    sums: list[torch.Tensor | None],
) -> None:
    """Add a part's gradients to the sums; what it was computed with can be forgotten then."""
    places = [place for place, source in enumerate(sources) if source.requires_grad]
    if not places or not part.requires_grad:
        return
    found = torch.autograd.grad(part, [sources[place] for place in places], allow_unused=True)
    for place, gradient in zip(places, found, strict=True):
        if gradient is not None:
            # Not in place: two sources may have got one tensor.
            before = sums[place]
            sums[place] = gradient if before is None else before + gradient


def _recomputed(parts: Parts, size: int, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The sum [], and losses and ranks [R, ...] of one part after the other."""

    def in_a_row(*chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = list(parts(*chunk))
        known = (x for _, losses, ranks in found for x in (losses.detach(), ranks))
        return torch.stack([part for part, *_ in found]).sum(), *known

    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    sums, *of_rows = zip(
        *(checkpoint(in_a_row, *chunk, use_reentrant=False) for chunk in chunks), strict=True
    )
    return torch.stack(sums).sum(), *(torch.cat(column) for column in of_rows)
