"""Positions of a tree's nodes for decoders that count positions by themselves, as T5's and BART's.

They count columns of the cache. Hooks give them the position that each node has in its own path:
to T5's self-attention a bias for the distance of each key, to BART and its relatives the numbers
of the rows that they look up in a table of positions.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def placed(
    decoder: nn.Module,
    positions: torch.Tensor,  # [B, T]
    mask: torch.Tensor,  # [B, 1, T, S] additive, of self-attention
) -> Iterator[None]:
    """Within, a decoder has its tokens at these positions, in passes of this thread.

    The caller holds the model's `hook_lock`, as passes with `Taps` do.
    """
    with ExitStack() as hooks:
        if (attention := biased_attention(decoder)) is not None:
            hooks.enter_context(given(attention, {BIAS: distance_bias(attention, mask)}))
        if (table := position_table(decoder)) is not None:
            # Decoders give all positions in one row; the embeddings [B x T, D] become rows again.
            hooks.enter_context(given(table, {NUMBERS: positions.flatten()}))
            in_rows = in_this_thread(lambda _, __, found: found.view(*positions.shape, -1))
            hooks.enter_context(table.register_forward_hook(in_rows))
        yield


def given(module: nn.Module, arguments: dict[str, torch.Tensor]) -> RemovableHandle:
    """A hook by which the module's calls have these arguments [...]."""
    hook = in_this_thread(lambda _, inputs, options: (inputs, options | arguments))
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def distance_bias(attention: nn.Module, mask: torch.Tensor) -> torch.Tensor:
    """The bias [B, H, T, S] by the distance of each key from each query, in positions.

    For the mask 0 -inf 0 0 of one query, keys are at positions 0 0 1 2 and their distances are
    2 2 1 0.
    """
    places = key_positions(mask)
    distances = (places[..., -1:] - places).clamp_min(0).long()[:, 0]  # [B, T, S]
    columns = distances.shape[-1]
    # The model's own bias of a query at the last of so many positions: by distance, backwards.
    last: torch.Tensor = attention.compute_bias(  # type: ignore[operator]
        1, columns, device=distances.device, past_seen_tokens=columns - 1
    )
    by_distance = last[0, :, 0].flip(-1)  # [H, S]
    return by_distance[:, distances].transpose(0, 1)
