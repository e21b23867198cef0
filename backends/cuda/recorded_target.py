"""A target whose passes are recorded: same inputs, same outputs, less time.

Layers are recorded as they are, or compiled. Long prompts are read eagerly.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from drafthead.backends.cuda.backend import RecordingBackend
from drafthead.backends.cuda.compiled_layers import CompiledLayers, Together
from drafthead.backends.cuda.tree_kernels import CudaTreeKernels
from drafthead.core.backend import BACKENDS
from drafthead.core.errors import first_line
from drafthead.core.kv_cache.column_cache import FRESH, CacheView, move_columns
from drafthead.core.target.features import NO_FEATURES, Features, FeatureSpec, concatenated
from drafthead.core.target.hooks import Taps
from drafthead.core.target.masks import LayerMasks
from drafthead.core.target.target import PassInputs, Target, TargetOutput
from drafthead.core.target.tree_cache import StepCache, TreeCache
from drafthead.core.target.weight_state import state_of
from drafthead.core.trees.tree import ancestor_mask

# Share of their size by which logits may differ that two attention kernels lead to, in bfloat16.
MOST_DIFFERENT = 0.05

# Positions of a row that recorded passes read as trees, so many at a time: a pass over a prompt as
# it is, of 256 tokens and 8B weights, takes as long as six of them; a shorter one mostly launches.
AS_TREES, OF_A_TREE = 256, 64

logger = logging.getLogger(__name__)


class RecordedTarget(Target):
    """A target that records each shape of pass that it meets."""

    backend: RecordingBackend
    kernels: CudaTreeKernels | None

    def __init__(self, target: Target, fuses: bool = True):
        """Share the target's model; with `fuses` its layers are compiled."""
        super().__init__(target.model, target.tokenizer)
        self.numbers = target.numbers  # a part is not asked whether kernels fit it
        self.backend = RecordingBackend(target.device, fuses)
        with_code = self.backend.fuses
        self.layer_codes = CompiledLayers(list(self.layers.children())) if with_code else None
        self.kernels = self._tree_kernels() if target.device.type == "cuda" else None
        # Falcon makes its bias and its mask of different numbers, of which one counts no columns
        # beyond the text.
        self.memory = FRESH if self.has_alibi else self.backend.memory
        self.state = state_of(self.model)  # that recordings were made for
        self.move = self.backend.record(move_columns, held=(0, 1))

    def around(self, taps: Taps) -> AbstractContextManager[object]:
        makers: list[Callable[[], AbstractContextManager[object]]] = [lambda: taps]
        if self.layer_codes is not None:
            makers.append(self.layer_codes.used)
        if self.kernels is not None:
            makers.append(self.kernels.used)
        return taps if len(makers) == 1 else Together(*makers)

    def tree_mask(
        self,
        cache: TreeCache,
        visible: torch.Tensor,  # [B or 1, N, pending + N]
    ) -> LayerMasks:
        nodes, count = visible.shape[1:]
        if self.kernels is None or cache.lengths is None or count > self.kernels.most_nodes:
            return super().tree_mask(cache, visible)
        view = cache.view(nodes, self.kernels)
        return self.kernels.masks(visible, view.lengths, view.room.columns[0] - (count - nodes))

    def later_mask(self, cache: TreeCache, places: torch.Tensor) -> torch.Tensor:  # [T]
        if self.kernels is None or not self.kernels.reads_later:
            return super().later_mask(cache, places)
        cache.room(len(places))
        return self.kernels.later_mask(cache.longest + len(places), places.device)

    @torch.no_grad()
    def _tree_kernels(self) -> CudaTreeKernels | None:
        """The kernels, where the model computes the same logits by them as by masks."""
        kernels = CudaTreeKernels.for_model(self.model, self.config, self.layer_kinds)
        if kernels is None or self.numbers is not None:
            return None
        # Siblings after a committed text: a node that saw the wrong keys would show here. They are
        # as many as trees can have, so that the kernel is tried which needs most of the device.
        nodes = kernels.most_nodes
        ids = torch.arange(1, nodes + 1, device=self.device)[None].clamp_max(self.vocab_size - 1)
        prompt = ids[:, :8]
        cache = TreeCache()
        steps = torch.arange(8, device=self.device)[None]
        super().passed(PassInputs(prompt, steps, None, NO_FEATURES, cache))
        cache.commit_prompt(torch.tensor([8], device=self.device), 8, room=nodes)
        # Each node has two children: the root 1 and 2, node 1 has 3 and 4.
        parents = (torch.arange(nodes, device=self.device)[None] - 1).div(2, rounding_mode="floor")
        visible = ancestor_mask(parents)
        tokens, positions = ids, cache.positions(1) + visible.sum(-1) - 1
        mask = super().tree_mask(cache, visible)
        masked = super().forward(tokens, positions, mask, cache)
        masks = kernels.masks(visible, cache.positions(1)[0], cache.positions(1)[0, 0])
        columns = kernels.cache(cache.keys, cache.values)
        seen = tokens, positions, masks, columns
        if not self._is_same(masked, seen, kernels.used(), "trees"):
            return None
        if all(kind.reach == float("inf") for kind in self.layer_kinds):
            tokens, positions = ids[:, :3], cache.positions(3)
            mask = super().later_mask(cache, positions[0])
            masked = super().forward(tokens, positions, mask, cache)
            later = tokens, positions, kernels.later_mask(cache.longest + 3, self.device), cache
            kernels.reads_later = self._is_same(masked, later, kernels.used_later(), "prompts")
        return kernels

    def _is_same(
        self,
        masked: torch.Tensor,  # [B, N, V] logits
        inputs: tuple[torch.Tensor, torch.Tensor, LayerMasks, Cache],  # of `forward`
        attention: AbstractContextManager[None],
        what: str,  # is read by that attention
    ) -> bool:
        """Whether the logits of a pass are those with masks; one line in the log where not."""
        try:
            with attention:
                found = super().forward(*inputs)
        except Exception as error:  # whatever the code of a model raises that is given these
            reason = first_line(error)
        else:
            share = float((found.float() - masked.float()).norm() / masked.float().norm())
            if share < MOST_DIFFERENT:
                return True
            reason = f"its logits differ by {share:.1%}"
        logger.info("%s reads %s with masks: %s", type(self.model).__name__, what, reason)
        return False

    def new_cache(self) -> TreeCache:
        """A cache for passes that follow each other.

        Where weights or adapters have changed since the last one, all is recorded again.
        """
        state = state_of(self.model)
        if state != self.state:
            self.state = state
            self.backend.forget()
        return TreeCache(self.memory, self.move)

    def passed(self, given: PassInputs) -> tuple[torch.Tensor | None, Features]:
        """Logits [B, T, V] and features [B, T, D]; short prompts are read as trees."""
        cache, mask, without_logits = given.cache, given.mask, given.logits_to_keep is None
        if isinstance(cache, TreeCache):
            if without_logits and self._reads_as_trees(given, cache):
                return None, self._read_as_trees(given, cache)
            if not without_logits and cache.keys and mask is not None:
                step = self._pass(given.features, True)
                output = step(given.ids, given.positions, mask, cache)
                return output.logits, output.features
        if without_logits and is_for_kernels(mask):
            assert self.kernels is not None
            with self.kernels.used_later():
                return super().passed(given)
        return super().passed(given)

    def _reads_as_trees(self, given: PassInputs, cache: TreeCache) -> bool:
        """Whether a pass over positions of a prompt is left to recorded ones over trees."""
        rows, count = given.ids.shape
        begins = given.mask is None and not cache.keys
        is_short = rows == 1 and count <= AS_TREES and self.skips_logits
        return self.kernels is not None and is_short and (begins or is_for_kernels(given.mask))

    def _read_as_trees(self, given: PassInputs, cache: TreeCache) -> Features:
        """Read positions that follow what the cache holds, as chains of so many nodes each."""
        count, parts = given.ids.shape[1], []
        if not cache.keys:
            cache.collect([self.one_token], [[0]], count + OF_A_TREE)
            cache.cut(0)
        # Padding comes last, where nothing sees it. Each part is laid out alike, or it would be
        # another recording.
        ids, positions = (
            pad(each, (0, -count % OF_A_TREE)).flatten().clone().view(-1, 1, OF_A_TREE)
            for each in (given.ids, given.positions)
        )
        chain = torch.ones(1, OF_A_TREE, OF_A_TREE, dtype=torch.bool, device=ids.device).tril()
        run = self._pass(given.features, False)
        for number, (part, places) in enumerate(zip(ids, positions, strict=True)):
            mask = self.tree_mask(cache, chain)
            parts.append(run(part, places, mask, cache).features)
            read = min(OF_A_TREE, count - number * OF_A_TREE)
            assert cache.lengths is not None
            cache.commit(None, cache.lengths + read, cache.longest + read)
        return concatenated(parts, dim=1).map(lambda hidden: hidden[:, :count])

    def _pass(self, features: FeatureSpec, has_logits: bool) -> "RecordedPass":
        """The passes that keep these features, with logits or without."""
        kind = features, has_logits
        if kind not in self.functions:
            # Not replaced, should another thread have been quicker: all is recorded only once.
            self.functions.setdefault(kind, RecordedPass(self, features, has_logits))
        return self.functions[kind]


def is_for_kernels(mask: LayerMasks) -> bool:
    """Whether what takes the place of a mask is for the tree kernel."""
    return isinstance(mask, dict) or (mask is not None and mask.dtype == torch.int64)


class RecordedPass:
    """The passes of a target that keep the same features."""

    def __init__(self, target: "RecordedTarget", features: FeatureSpec, has_logits: bool):
        """Without logits where these are not needed and the model can skip them."""
        self.target, self.has_logits = target, has_logits
        self.taps = Taps(target, features)
        self.recorded = target.pass_function(self._forward, self.taps)

    def __call__(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: LayerMasks,  # [B, 1, T, S], or what the kernel takes in its place
        cache: TreeCache,
    ) -> TargetOutput:
        """Run the pass and write its keys and values into `cache`."""
        kernels = self.target.kernels if is_for_kernels(attention_mask) else None
        view = cache.view(input_ids.shape[1], kernels)
        if (numbers := self.target.numbers) is not None:
            keys, values = ([part[number] for number in numbers] for part in view[:2])
            view = view._replace(keys=keys, values=values)
        logits, last, taps = self.recorded(input_ids, position_ids, attention_mask, view)
        return TargetOutput(logits, Features(last, taps))

    def _forward(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: LayerMasks,  # as above
        view: CacheView,  # T columns
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """Logits [B, T, V] and features [B, T, D]; what is recorded."""
        cache = StepCache.of(view, self.target.numbers)
        kept = 0 if self.has_logits else torch.empty(0, dtype=torch.long, device=input_ids.device)
        logits = self.target.forward(input_ids, position_ids, attention_mask, cache, kept)
        features = self.taps.features()
        return logits, features.last, features.taps


BACKENDS["recorded"] = RecordedTarget
