"""A whole step as one graph: the pass, the verdict, the moves in the cache, and small drafts.

Each part is short, but the pass has just flushed the CPU caches, so a dozen separate calls would
cost more than their work. The graph serves the rules that accept the target's own tokens, `greedy`
and `match`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.heads.dims import Spec
from drafthead.heads.few_sizes import power_of_two
from drafthead.heads.kv_cache.column_cache import Layers, additive, move_columns, visible_columns
from drafthead.heads.sampling import draw, most_probable
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.target.hooks import Taps
from drafthead.heads.target.masks import LayerMasks
from drafthead.heads.target.target import Target
from drafthead.heads.target.tree_cache import StepCache, TreeCache
from drafthead.heads.trees.recipe import NO_NODE, TokenFiller, TreeRecipe
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.engine.stepper import Outcome, following_tokens, in_one_table, read_table
from drafthead.infer.verifiers.base import Acceptance, follow


class StepResult(NamedTuple):
    """What the graph of a step returns; paths have N places, whatever the depth of the tree."""

    path: torch.Tensor  # [B, N] accepted nodes, see `Acceptance`
    length: torch.Tensor  # [B]
    bonus: torch.Tensor  # [B]
    tokens: torch.Tensor  # [B, N] after the path's nodes
    table: torch.Tensor  # [B, 1 + 2N] lengths, tokens and path, for one copy to the host
    committed: torch.Tensor  # [B] committed positions, these included
    last: torch.Tensor | None  # [B, N, D] last hidden states at the path's nodes
    taps: tuple[torch.Tensor, ...]  # [B, N, D] each
    hidden: torch.Tensor | None  # [B, D] last hidden state at the path's end


# Dimensions of the arguments of a step, but for those of the tokens.
STEP: dict[str, Spec] = {
    "parents": "B N",
    "depths": "B N",
    "ancestors": "B N N",
    "lengths": "B",
    "seen": "S",
    "columns": "N",
    "keys": "B . C .",
    "values": "B . C .",
    "draws": (".", "B N"),
}


class Draws(NamedTuple):
    """What the target's own tokens are drawn with."""

    settings: torch.Tensor  # [4], see `SamplingConfig.settings`
    keys: torch.Tensor  # [B, depth + 1] of races, of which place d is for the nodes of depth d


class GraphStep:
    """The steps of a target that keep the same features and fill their trees in the same way."""

    def __init__(self, target: Target, features: FeatureSpec, filler: TokenFiller):
        self.target, self.filler = target, filler
        self.few_sizes = target.memory is not None  # trees are filled up to a power of two
        self.taps = Taps(target, features)
        dims = STEP | {"arguments": filler.dims}
        reads = features, filler.tokens, filler.dims, filler.reads
        self.graphs = target.pass_function(self._step, dims, self.taps, self._variant, reads)
        backend = target.backend
        self.move = backend.replacement_of(move_columns)
        self.draw = backend.fused(backend.replacement_of(draw))

    def __call__(
        self, recipe: TreeRecipe, cache: TreeCache, draws: Draws | None, whole: bool
    ) -> Outcome:
        """Verify the tree after the committed tokens, and move the accepted path next to them.

        The target's own tokens are its most probable ones, or draws with `draws`, which are `whole`
        where the settings are no more than a temperature. The caller still has to tell the cache
        how long the path is.
        """
        if self.few_sizes:
            recipe = recipe.padded(power_of_two(recipe.num_nodes))
        seen, columns = cache.make_room(recipe.num_nodes)
        if self.target.kernels_for(recipe.num_nodes) is not None:
            seen = cache.numbers[:0]  # kernels read lengths: one graph for all of them
        if draws is not None:
            # One graph serves trees of all depths: it takes as many numbers as the tree has nodes.
            unused = recipe.num_nodes - draws.keys.shape[1]
            draws = draws._replace(keys=pad(draws.keys, (0, unused)))
        result: StepResult = self.graphs(
            recipe.arguments,
            recipe.parents,
            recipe.depths,
            recipe.ancestors,
            cache.lengths,
            seen,
            columns,
            cache.keys,
            cache.values,
            draws,
            not whole
            and not self.target.backend.has_kernels,  # the kernel reads it from the settings
        )
        return Outcome(
            acceptance=Acceptance(result.path, result.length, result.bonus),
            tokens=result.tokens,
            features=Features(result.last, result.taps),
            new_tokens=read_table(result.table)[0],
            committed_lengths=result.committed,
            in_place=True,
            hidden=result.hidden,
        )

    def _step(
        self,
        arguments: Sequence[torch.Tensor],  # of the filler
        parents: torch.Tensor,  # [B, N]
        depths: torch.Tensor,  # [B, N]
        ancestors: torch.Tensor,  # [B, N, N]
        lengths: torch.Tensor,  # [B] committed positions
        seen: torch.Tensor,  # [S] the numbers of the columns in use
        columns: torch.Tensor,  # [N] that the nodes are written to
        keys: Layers,  # of each layer [B, H, capacity, D]
        values: Layers,
        draws: Draws | None,
        filtered: bool,
    ) -> StepResult:
        """The traced function; its results have one place for each node, whatever the depth."""
        tokens = self.filler.tokens(*arguments)  # [B, N]
        if self.few_sizes:
            tokens = tokens.masked_fill(parents == NO_NODE, NO_NODE)
        positions = self.target.legal_positions(lengths[:, None] + depths)
        kernels = self.target.kernels_for(tokens.shape[1])
        mask: LayerMasks
        if kernels is None:
            visible = visible_columns(ancestors, lengths, seen, columns[0])
            mask = additive(visible, self.target.dtype)
            cache = StepCache(keys, values, columns, seen.shape[0])
        else:
            mask = kernels.masks(ancestors, lengths, columns[0])
            cache = kernels.cache(keys, values)
        logits = self.target.forward(tokens.clamp_min(0), positions, mask, cache)
        features = self.taps.features()
        most = tokens.shape[1] - 1
        tree = TokenTree(tokens, parents, depths, ancestors, max_depth=most, width=most)
        accepted = follow(tree, self._target_tokens(tree, logits, draws, filtered))
        path, length = accepted.path, accepted.length
        if tokens.shape != (1, 1):  # the column of a single root is the right one
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            places = lengths[:, None] + steps
            if kernels is not None:
                kernels.commit([*keys, *values], path, length, lengths, columns[0])
            else:  # columns after the path stay where they are
                source = torch.where(steps < length[:, None], columns[path], places)
                self.move(keys, values, source, places)
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        on_path = features.map(lambda hidden: hidden[rows, path])
        end = path.gather(1, length[:, None] - 1)
        following = following_tokens(tree, accepted)
        return StepResult(
            path,
            length,
            accepted.bonus,
            following,
            in_one_table(following, accepted),
            lengths + length,
            on_path.last,
            on_path.taps,
            None if features.last is None else features.last[rows, end].squeeze(1),
        )

    def _target_tokens(
        self,
        tree: TokenTree,
        logits: torch.Tensor,  # [B, N, V]
        draws: Draws | None,
        filtered: bool,
    ) -> torch.Tensor:
        """The target's own token [B, N] after each node that a rule reads."""
        if draws is None:
            return most_probable(logits)
        keys = draws.keys.gather(1, tree.depths)
        return self.draw(logits, tree.tokens, tree.parents, keys, draws.settings, filtered)

    def _variant(
        self,
        arguments: Sequence[torch.Tensor],
        parents: torch.Tensor,  # [B, N]
        depths: torch.Tensor,  # [B, N]
        ancestors: torch.Tensor,  # [B, N, N]
        lengths: torch.Tensor,
        seen: torch.Tensor,  # [S]
        *_: object,
    ) -> tuple[bool, ...]:
        """Whether rows share their tables, and which layers look at a part of the columns only."""
        shared = (table.stride(0) == 0 for table in (parents, depths, ancestors))
        cut = (seen.shape[0] > kind.reach for kind in self.target.layer_kinds)
        return *shared, *cut
