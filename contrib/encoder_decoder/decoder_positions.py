"""Positions of a tree's nodes for decoders that count positions by themselves, as T5's and BART's.

They count columns of the cache. Hooks give them the position that each node has in its own path:
to T5's self-attention a bias for the distance of each key, to BART and its relatives the numbers
of the rows that they look up in a table of positions.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from drafthead.core.target.hooks import in_this_thread
from drafthead.core.target.masks import key_positions

# The arguments with which modules of transformers can be told positions.
BIAS, NUMBERS = "position_bias", "position_ids"


def takes(module: nn.Module, argument: str) -> bool:
    """Tell whether a module's `forward` has an argument of this name."""
    return argument in inspect.signature(type(module).forward).parameters


def biased_attention(decoder: nn.Module) -> nn.Module | None:
    """The self-attention that computes T5's relative bias, which all layers share.

    None where there is none, or one in each layer, which then can be told nothing (UMT5).
    """
    named = "has_relative_attention_bias"
    found = (module for module in decoder.modules() if getattr(module, named, False))
    return next((module for module in found if takes(module, BIAS)), None)


def position_table(decoder: nn.Module) -> nn.Module | None:
    """BART's table of positions, which takes their numbers; None where there is none."""
    table = getattr(decoder, "embed_positions", None)
    return table if isinstance(table, nn.Embedding) and takes(table, NUMBERS) else None


class DecoderPositions:
    """Hooks on a decoder that place its tokens during one pass of this thread.

    The caller holds the model's `hook_lock`, as passes with `Taps` do.
    """

    def __init__(
        self,
        decoder: nn.Module,
        positions: torch.Tensor,  # [B, T]
        mask: torch.Tensor,  # [B, 1, T, S] additive, of self-attention
    ):
        self.decoder, self.positions, self.mask = decoder, positions, mask
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> "DecoderPositions":
        """Attach the hooks."""
        if (attention := biased_attention(self.decoder)) is not None:
            self._before(attention, self._biased)
        if (table := position_table(self.decoder)) is not None:
            # Decoders give all positions in one row; the embeddings [B x T, D] become rows again.
            self._before(table, lambda _: {NUMBERS: self.positions.flatten()})
            in_rows = in_this_thread(lambda _, __, found: found.view(*self.positions.shape, -1))
            self.handles.append(table.register_forward_hook(in_rows))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks, whatever happened during the pass."""
        while self.handles:
            self.handles.pop().remove()

    def _before(self, module: nn.Module, change: Callable[[nn.Module], dict[str, Any]]) -> None:
        """Let the module's calls have the arguments that `change` returns."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return inputs, options | change(module)

        handle = module.register_forward_pre_hook(in_this_thread(hook), with_kwargs=True)
        self.handles.append(handle)

    def _biased(self, attention: nn.Module) -> dict[str, Any]:
        """The bias [B, H, T, S] by the distance of each key from each query, in positions.

        For the mask 0 -inf 0 0 of one query, keys are at positions 0 0 1 2 and their distances are
        2 2 1 0.
        """
        places = key_positions(self.mask)
        distances = (places[..., -1:] - places).clamp_min(0).long()[:, 0]  # [B, T, S]
        columns = distances.shape[-1]
        # The model's own bias of a query at the last of so many positions: by distance, backwards.
        last: torch.Tensor = attention.compute_bias(  # type: ignore[operator]
            1, columns, device=distances.device, past_seen_tokens=columns - 1
        )
        by_distance = last[0, :, 0].flip(-1)  # [H, S]
        return {BIAS: by_distance[:, distances].transpose(0, 1)}
