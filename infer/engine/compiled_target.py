"""A target whose steps run compiled: same inputs, same outputs, less time.

The prompt pass stays eager: it is one pass, of another length each time.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from drafthead.heads.graphs.compiled import Compiled, Sizes, sizes_behind_cache
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.target.target import Taps, Target, TargetOutput
from drafthead.heads.trees.recipe import TokenFiller, TreeRecipe
from drafthead.infer.engine.graph_step import Draws, GraphStep
from drafthead.infer.engine.kv_cache import Layers, StepCache, TreeCache, move_columns
from drafthead.infer.engine.outcome import Outcome

# Columns that attention reads are rounded up to these. A graph for CPUs takes any number of them; a
# CUDA graph is recorded for one number, so there are to be few.
COLUMNS_A_GRAPH = {False: 1, True: 128}


class CompiledTarget(Target):
    """A target that compiles a graph for each kind of pass that it meets: one or several tokens,
    one or several rows. Cache columns, tree nodes and rows change freely within a kind.
    """

    def __init__(self, target: Target):
        super().__init__(target.model, target.tokenizer)
        self.passes: dict[FeatureSpec, CompiledPass] = {}
        self.steps: dict[tuple[FeatureSpec, TokenFiller], GraphStep] = {}
        self.move = Compiled(move_columns, target.device, target.dtype, kind_of_move, sizes_of_move)

    @property
    def compile_seconds(self) -> float:
        """Time spent on compiling so far."""
        passes = [made.graphs for made in self.passes.values()]
        steps = [made.graphs for made in self.steps.values()]
        return sum(made.seconds for made in (self.move, *passes, *steps))

    def new_cache(self) -> TreeCache:
        """A cache for passes that follow each other."""
        return TreeCache(COLUMNS_A_GRAPH[self.device.type == "cuda"], self.move)

    @torch.no_grad()
    def step(
        self, recipe: TreeRecipe, features: FeatureSpec, cache: TreeCache, draws: Draws | None
    ) -> Outcome:
        """Verify a tree behind a committed prompt and put the accepted path in place."""
        made_for = features, recipe.filler
        if made_for not in self.steps:
            self.steps[made_for] = GraphStep(self, *made_for)
        return self.steps[made_for](recipe, cache, draws)

    @torch.no_grad()
    def run(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor | None,  # [B, 1, T, S]
        features: FeatureSpec,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """As `Target.run`; passes behind a committed prompt are compiled."""
        if not isinstance(cache, TreeCache) or not cache.keys or attention_mask is None:
            return super().run(
                input_ids, position_ids, attention_mask, features, cache, logits_to_keep
            )
        if features not in self.passes:
            self.passes[features] = CompiledPass(self, features)
        return self.passes[features](input_ids, position_ids, attention_mask, cache)


class CompiledPass:
    """The passes of a target that keep the same features."""

    def __init__(self, target: Target, features: FeatureSpec):
        self.target = target
        self.taps = Taps(target, features)
        self.graphs = Compiled(
            self._forward, target.device, target.dtype, self._kind, sizes_of_pass, self.taps
        )

    def __call__(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        cache: TreeCache,
    ) -> TargetOutput:
        """Run the pass and write its keys and values into `cache`."""
        _, columns = cache.make_room(input_ids.shape[1])
        logits, last, taps = self.graphs(
            input_ids, position_ids, attention_mask, columns, cache.keys, cache.values
        )
        return TargetOutput(logits, Features(last, taps))

    def _forward(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        columns: torch.Tensor,  # [T]
        keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """Logits [B, T, V] and features [B, T, D]; what is traced into a graph."""
        cache = StepCache(keys, values, columns, attention_mask.shape[-1])
        logits = self.target.forward(input_ids, position_ids, attention_mask, cache)
        features = self.taps.features()
        return logits, features.last, features.taps

    def _kind(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        *_: object,
    ) -> tuple[bool, ...]:
        """One row or several, one token or several, and which layers look at a part only."""
        end = attention_mask.shape[-1]
        cut = (end > kind.reach for kind in self.target.layer_kinds)
        return input_ids.shape[0] == 1, input_ids.shape[1] == 1, *cut


def sizes_of_pass(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    columns: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> Sizes:
    """The sizes of a pass that change."""
    by_token = input_ids, position_ids
    return sizes_behind_cache(by_token, attention_mask, columns, (*keys, *values))


def kind_of_move(
    keys: Layers, values: Layers, source: torch.Tensor, *_: object
) -> tuple[bool, bool]:
    """One row or several, one column or several: source [B, P]."""
    return source.shape[0] == 1, source.shape[1] == 1


def sizes_of_move(
    keys: Layers, values: Layers, source: torch.Tensor, destination: torch.Tensor
) -> Sizes:
    """The sizes that change from one commit to the next: rows, path, columns there are."""
    layers, moves = (*keys, *values), (source, destination)
    return [
        [(tensor, 0) for tensor in (*layers, *moves)],
        [(tensor, 1) for tensor in moves],
        [(tensor, 2) for tensor in layers],
    ]


def new_cache(target: Target) -> TreeCache:
    """An empty cache that suits the way in which the target runs its passes."""
    return target.new_cache() if isinstance(target, CompiledTarget) else TreeCache()
