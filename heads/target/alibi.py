"""ALiBi targets (arXiv 2108.12409): attention scores carry a bias by key position, not rotations.

BLOOM and Falcon compute this bias from cache columns, but the column of a tree node is not its
position. So the model computes the bias as if there were no tree, and a hook before each layer
moves every value to the columns that have its position under the tree mask.
"""

from collections.abc import Iterable

import torch
from torch import nn

from drafthead.heads.target.hooks import in_this_thread
from drafthead.heads.target.masks import key_positions


class AlibiByPosition:
    """Hooks on a model's layers that rearrange its ALiBi bias during one pass of this thread.

    The model is called without a mask, and its layers receive `mask`. The caller holds the model's
    `hook_lock`, as passes with `Taps` do.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        mask: torch.Tensor,  # [B, 1, T, S] additive
    ):
        self.layers, self.mask = list(layers), mask
        self.arranged: dict[str, torch.Tensor] | None = None

    def __enter__(self) -> "AlibiByPosition":
        """Attach the hooks."""
        self.handles = [
            layer.register_forward_pre_hook(in_this_thread(self._arrange), with_kwargs=True)
            for layer in self.layers
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks, whatever happened during the pass."""
        for handle in self.handles:
            handle.remove()

    def _arrange(
        self, _layer: nn.Module, inputs: tuple[object, ...], options: dict[str, torch.Tensor]
    ) -> tuple[tuple[object, ...], dict[str, torch.Tensor]]:
        if self.arranged is None:  # the same for all layers of a pass
            self.arranged = self._by_position(options["alibi"], options["attention_mask"])
        return inputs, options | self.arranged

    def _by_position(self, alibi: torch.Tensor, by_column: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = key_positions(self.mask).clamp_min(0).long()  # [B, 1, T, S]
        batch, _, queries, columns = positions.shape

        def arrange(bias: torch.Tensor) -> torch.Tensor:  # [B, H, 1, S] to [B, H, T, S]
            shape = (batch, bias.shape[1], queries, columns)
            return bias.expand(shape).gather(-1, positions.expand(shape))

        if alibi.dim() == 3:  # BLOOM: bias [B x H, 1, S] and mask are separate
            bias = arrange(alibi.view(batch, -1, 1, columns))
            return {"alibi": bias.flatten(0, 1), "attention_mask": self.mask}
        # Falcon adds the bias to the mask [B, H, T, S]; only the last query's row has all of it.
        bias = arrange(by_column[:, :, -1:])
        blocked = torch.finfo(bias.dtype).min
        return {"attention_mask": bias.masked_fill(self.mask < 0, blocked)}
