"""The kernels of recorded passes over trees, where they fit a target, as passes use them.

This is what needs no Triton: the kernels themselves are imported for a GPU alone.
"""

import logging
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from drafthead.backends.cuda import MOST_NODES
from drafthead.backends.cuda.recorded import place_of
from drafthead.core.errors import UserError
from drafthead.core.kv_cache.column_cache import GrowingKeys
from drafthead.core.target.masks import LayerKind, LayerMasks
from drafthead.core.target.tree_cache import StepCache

if TYPE_CHECKING:
    from drafthead.backends.cuda.commit import CacheTable

EVERYTHING = (LayerKind("full_attention"),)
AMPERE = 8, 0  # for older chips Triton computes products in memory

logger = logging.getLogger(__name__)


class KernelCache(StepCache):
    """A cache as a model of transformers sees it whose attention writes into it."""

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, G, capacity, D]
        values: Sequence[torch.Tensor],  # as keys
        pending: int = 0,
    ):
        """`pending` nodes are in the cache, which the new ones follow."""
        no_columns = torch.empty(0, dtype=torch.long, device=keys[0].device)
        super().__init__(keys, values, no_columns, keys[0].shape[2])
        self.pending: int = pending

    def append(  # type: ignore[override]
        self,
        layer: int,
        keys: torch.Tensor,  # [B, G, N, D]
        values: torch.Tensor,  # [B, G, N, D]
    ) -> tuple[GrowingKeys, GrowingKeys]:
        """The keys and the values of a layer as the attention is given them."""
        return (
            GrowingKeys(self.keys[layer], keys, self.pending),
            GrowingKeys(self.values[layer], values, self.pending),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Raises UserError: models that count by it cannot be run with this cache."""
        raise UserError("this model counts columns of its cache, whose number the GPU alone knows")


class CudaTreeKernels:
    """Attention over trees, and the moves after a verdict, in a launch or two each."""

    most_nodes = MOST_NODES
    # Whether prompts are read without masks, see `registration.attend_later`; until that was tried
    # with the model.
    reads_later = False

    def __init__(self, config: PretrainedConfig, kinds: tuple[LayerKind, ...]):
        """For models with this text configuration and these layers; Triton has to be there."""
        from drafthead.backends.cuda import commit, registration

        self.config, self.kinds = config, kinds
        self.registration, self.moving = registration, commit
        self.tables: dict[Hashable, CacheTable] = {}

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, config: PretrainedConfig, kinds: tuple[LayerKind, ...]
    ) -> "CudaTreeKernels | None":
        """The kernels, or None, with a line in the log, where the model cannot have them."""
        if config._attn_implementation != "sdpa" or is_old(model.device):
            return None
        try:
            kernels = cls(config, kinds)
        except ImportError as error:
            logger.warning("trees are read with masks, which is slower: %s", error)
            return None
        if reason := kernels.registration.reason_against(model, config):
            logger.info("%s reads trees with masks: %s", type(model).__name__, reason)
            return None
        return kernels

    def masks(
        self,
        visible: torch.Tensor,  # [B or 1, N, M] bool: which of M <= 64 nodes each of N sees
        lengths: torch.Tensor,  # [B] committed positions
        start: torch.Tensor,  # [] column of the first of the M nodes
    ) -> LayerMasks:
        """The mask for the model, see `registration.sights`."""
        return self.registration.sights(visible, lengths, start.expand_as(lengths), self.kinds)

    def sight(
        self, visible: torch.Tensor, lengths: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """`masks` of layers without windows, those of draft heads: int64 [B, 1, 3, N]."""
        found = self.registration.sights(visible, lengths, start.expand_as(lengths), EVERYTHING)
        assert isinstance(found, torch.Tensor)
        return found

    def cache(
        self,
        keys: Sequence[torch.Tensor],  # of each layer [B, G, capacity, D]
        values: Sequence[torch.Tensor],  # as keys
        pending: int = 0,
    ) -> KernelCache:
        """The cache that goes with these masks."""
        return KernelCache(keys, values, pending)

    def used(self) -> AbstractContextManager[None]:
        """Within, layers of the model attend by the kernel."""
        return self.registration.in_attention_of(self.config)

    def later_mask(self, end: int, device: torch.device) -> torch.Tensor:
        """The mask [1, 1, 0, S] of a prompt's positions that are the last of so many columns."""
        return self.registration.later_mask(end, device)

    def used_later(self) -> AbstractContextManager[None]:
        """Within, layers of the model attend as those masks want."""
        return self.registration.in_attention_of(self.config, self.registration.LATER)

    def commit(
        self,
        states: Sequence[torch.Tensor],  # keys and values of all layers, [B, G, capacity, D]
        path: torch.Tensor,  # [B, P] accepted nodes in order
        accepted: torch.Tensor,  # [B] their number
        lengths: torch.Tensor,  # [B] positions committed before
        start: torch.Tensor,  # [] column of the tree's first node
    ) -> None:
        """Move the accepted nodes next to what their rows have committed.

        The calls before a recording make the table of addresses: while recording nothing can be
        copied to the device.
        """
        key = place_of(states)  # memory may come back in another shape
        if key not in self.tables:
            self.tables[key] = self.moving.CacheTable(states)
        starts = start.expand_as(lengths)
        self.moving.commit(self.tables[key], path, accepted, lengths, starts)


def is_old(device: torch.device) -> bool:
    """Whether a device is too old for the kernels: one of NVIDIA's before Ampere."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) < AMPERE
