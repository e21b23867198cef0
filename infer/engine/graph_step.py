"""What a step does, as one graph: pass, verdict, accepted path in place, and small drafts as well.

Each of these is short, but the pass has just read all weights, so that nothing of the program that
comes next is left in the processor's caches: a dozen small calls would take longer than their work.
The graph serves the rules that accept what the target itself says: `greedy` and `match`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.heads.graphs.compiled import Compiled, Sizes
from drafthead.heads.graphs.substitutions import replacement_of
from drafthead.heads.layers.columns import move_columns
from drafthead.heads.sampling import draw
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.target.target import Taps, Target
from drafthead.heads.trees.recipe import TokenFiller, TreeRecipe
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.engine.kv_cache import Layers, StepCache, TreeCache
from drafthead.infer.engine.outcome import Outcome, following_tokens, in_one_table, to_host
from drafthead.infer.verifiers.base import Acceptance, follow

# An acceptance (path, length, bonus), tokens, both in one table, committed lengths, features (last,
# taps), last at the end.
Parts = tuple[
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    tuple[torch.Tensor, ...],
    torch.Tensor | None,
]


class Draws(NamedTuple):
    """What the target's own tokens are drawn with."""

    temperature: torch.Tensor  # scalar
    uniform: torch.Tensor  # [B, D + 1], of which place d is for the nodes of depth d


class GraphStep:
    """The steps of a target that keep the same features and fill their trees in the same way."""

    def __init__(self, target: Target, features: FeatureSpec, filler: TokenFiller):
        self.target, self.filler = target, filler
        self.taps = Taps(target, features)
        sizes = partial(sizes_of_step, filler)
        self.graphs = Compiled(
            self._step, target.device, target.dtype, self._kind, sizes, self.taps
        )
        has_kernels = self.graphs.has_kernels
        self.move, self.draw = (replacement_of(f, has_kernels) for f in (move_columns, draw))

    def __call__(self, recipe: TreeRecipe, cache: TreeCache, draws: Draws | None) -> Outcome:
        """Verify the tree behind what the cache has committed, and put the accepted path there.

        The target says its most probable token, or with `draws` one that it draws. The cache is not
        told yet how long the path is.
        """
        seen, columns = cache.make_room(recipe.num_nodes)
        if draws is not None:  # a graph takes as many numbers as nodes
            unused = recipe.num_nodes - draws.uniform.shape[1]
            draws = draws._replace(uniform=pad(draws.uniform, (0, unused)))
        accepted, tokens, table, lengths, last, taps, hidden = self.graphs(
            recipe.arguments,
            recipe.parents,
            recipe.depths,
            recipe.ancestors,
            cache.lengths,
            seen,
            columns,
            cache.keys,
            cache.values,
            *(draws or ()),
        )
        answers, _ = to_host(table)
        acceptance, features = Acceptance(*accepted), Features(last, taps)
        return Outcome(acceptance, tokens, features, answers, lengths, in_place=True, hidden=hidden)

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
        *draws: torch.Tensor,  # the fields of `Draws`, or nothing
    ) -> Parts:
        """What is traced into a graph: the parts of an outcome, some in one table as well.

        All are as long as the tree has nodes, so that one graph serves trees of any depth.
        """
        tokens = self.filler.tokens(*arguments)  # [B, N]
        positions = lengths[:, None] + depths
        if self.target.max_length is not None:
            # What lies past the end of the context is never kept, but is computed.
            positions = positions.clamp_max(self.target.max_length - 1)
        mask = mask_of_nodes(ancestors, lengths, seen, columns, self.target.dtype)
        cache = StepCache(keys, values, columns, seen.shape[0])
        logits = self.target.forward(tokens.clamp_min(0), positions, mask, cache)
        features = self.taps.features()
        most = tokens.shape[1] - 1
        tree = TokenTree(tokens, parents, depths, ancestors, max_depth=most, width=most)
        found = follow(tree, self._said(logits, depths, Draws(*draws) if draws else None))
        if tokens.shape != (1, 1):  # a single root is where it belongs
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            places = lengths[:, None] + steps
            # What lies behind the path stays where it is.
            source = torch.where(steps < found.length[:, None], columns[found.path], places)
            self.move(keys, values, source, places)
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        kept = features.map(lambda hidden: hidden[rows, found.path])
        end = found.path.gather(1, found.length[:, None] - 1)
        hidden = None if features.last is None else features.last[rows, end].squeeze(1)
        following = following_tokens(tree, found)
        table = in_one_table(following, found)
        accepted = found.path, found.length, found.bonus
        return accepted, following, table, lengths + found.length, kept.last, kept.taps, hidden

    def _said(
        self,
        logits: torch.Tensor,  # [B, N, V]
        depths: torch.Tensor,  # [B, N]
        draws: Draws | None,
    ) -> torch.Tensor:
        """The target's own token [B, N] behind each node."""
        if draws is None:  # as float32: a CPU searches 16-bit numbers four times slower
            return logits.float().argmax(-1)
        return self.draw(logits, draws.temperature, draws.uniform.gather(1, depths))

    def _kind(
        self,
        arguments: Sequence[torch.Tensor],
        parents: torch.Tensor,  # [B, N]
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        lengths: torch.Tensor,
        seen: torch.Tensor,  # [S]
        columns: torch.Tensor,
        keys: Layers,
        values: Layers,
        *draws: torch.Tensor,
    ) -> tuple[bool, ...]:
        """One row or several, one node or several, whether rows share their tables or have their
        own, and which layers look at a part of the columns only; drawn or most probable tokens.
        """
        shared = (table.stride(0) == 0 for table in (parents, depths, ancestors))
        cut = (seen.shape[0] > kind.reach for kind in self.target.layer_kinds)
        return parents.shape[0] == 1, parents.shape[1] == 1, *shared, *cut, bool(draws)


def mask_of_nodes(
    ancestors: torch.Tensor,  # [B, N, N]
    lengths: torch.Tensor,  # [B]
    seen: torch.Tensor,  # [S]
    columns: torch.Tensor,  # [N]
    dtype: torch.dtype,
) -> torch.Tensor:
    """The additive mask [B, 1, N, S]: a node sees what its row has committed, and its ancestors.

    `TreeCache.mask` in a form without parts of other sizes, for graphs: with 3 positions committed
    and nodes at columns 3 and 4, column 4 is node 1, and columns from 5 on are nobody's.
    """
    nodes = seen - columns[0]
    is_node = (nodes >= 0) & (nodes < columns.shape[0])
    above = ancestors.index_select(-1, nodes.clamp(0, columns.shape[0] - 1)) & is_node
    visible = above | (seen < lengths[:, None])[:, None]
    blocked = torch.finfo(dtype).min
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, blocked)[:, None]


def sizes_of_step(
    filler: TokenFiller,
    arguments: Sequence[torch.Tensor],
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    lengths: torch.Tensor,
    seen: torch.Tensor,
    columns: torch.Tensor,
    keys: Layers,
    values: Layers,
    temperature: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
) -> Sizes:
    """The sizes of a step that change: rows, nodes, columns in use, columns there are."""
    layers = *keys, *values
    tables = [parents, depths, ancestors, *([] if uniform is None else [uniform])]
    by_row, by_node = (
        [(arguments[place], dim) for place, dim in places] for places in (filler.rows, filler.nodes)
    )
    return [
        [*((tensor, 0) for tensor in (*tables, lengths, *layers)), *by_row],
        [*((tensor, 1) for tensor in tables), (ancestors, 2), (columns, 0), *by_node],
        [(seen, 0)],
        [(tensor, 2) for tensor in layers],
    ]
