"""The target drafts for itself: some of its layers, then its own norm and output head.

No training, and no second model (LayerSkip, arXiv 2404.16710; Draft & Verify, arXiv 2309.08168).
The layers that draft see in the target's cache what the target has committed, so none of them reads
a committed token again. What they write there for drafted tokens is discarded: the pass that
verifies these computes all layers.
"""

import re
from collections.abc import Sequence

import torch

from drafthead.contrib.own_layers.part import part_of, refuse_other_layers
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer.drafters.level_drafter import LevelDrafter, LevelSession
from drafthead.infer.loading.loaded import Fitting, register_drafter

LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


@register_drafter("layers", "0-7,20-29", has_length=True)
def named_layers(choice: str, fitting: Fitting) -> Drafter:
    """The target's layers of a list; ``0-9`` is an exit after ten."""
    return OwnLayers(fitting.target, chosen_layers(choice, fitting.target), fitting.length)


def chosen_layers(choice: str, target: Target) -> tuple[int, ...]:
    """The layers of a list such as ``0-7,20-29``.

    Raises UserError for what is no list, and for layers that are no part of the target.
    """
    if not LIST.fullmatch(choice):
        raise UserError(f"layers:{choice} is not a list of layers, such as layers:0-7,20-29")
    layers: list[int] = []
    for part in choice.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    refuse_other_layers(target, layers, named=choice)
    return tuple(layers)


class OwnLayers(LevelDrafter):
    """Chains and trees of up to `depth` levels from some of the target's layers."""

    def __init__(self, target: Target, layers: Sequence[int], depth: int):
        """Raises UserError for layers that are no part of the target, or a depth below 1."""
        super().__init__(part_of(target, layers), target, depth)

    def __repr__(self) -> str:
        return f"{super().__repr__()} within the target"

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T], which the target's cache holds."""
        return OwnLayersSession(self)


class OwnLayersSession(LevelSession):
    """Some of the target's layers at work in the cache of what it has committed."""

    row_state = ("roots",)
    roots_pending = True

    def commit(self, committed: Committed) -> None:
        """Keep the last tokens: what comes before them is in the target's cache."""
        self._judge(committed)
        assert committed.cache is not None
        self.cache = committed.cache
        self.roots = committed.ends.roots

    @torch.no_grad()
    def _after_roots(self) -> torch.Tensor:
        """The logits [B, V] after the last committed tokens, which become pending."""
        assert self.roots is not None
        nothing = torch.ones(1, 1, 0, dtype=torch.bool, device=self.roots.device)
        return self._feed(self.roots[:, None], 0, nothing)[:, -1]
