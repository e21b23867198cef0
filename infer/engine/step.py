"""A step after its draft: the pass over a tree, the verdict, and what is committed.

`settled` is what a step commits of a pass, under any rule. `StepFunction` is a whole step as one
function, which a backend compiles, under the rules that accept the target's own tokens (`greedy`
and `match`). Its parts are short, but the pass has just flushed the CPU caches, so a dozen separate
calls would cost more than their work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.core.dims import Spec
from drafthead.core.drafting.drafter import Committed, Ends, LateTokens
from drafthead.core.host import Arriving
from drafthead.core.kv_cache.column_cache import CacheView, additive, dims_of_view, move_columns
from drafthead.core.sampling import NO_TOKEN, draw, most_probable
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.hooks import Taps
from drafthead.core.target.masks import LayerMasks
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import StepCache, TreeCache
from drafthead.core.trees.recipe import NO_NODE, TokenFiller, TreeRecipe
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, follow


class StepResult(NamedTuple):
    """What a step commits, in tensors; paths of N places serve trees of any depth."""

    path: torch.Tensor  # [B, P] accepted nodes, see `Acceptance`
    length: torch.Tensor  # [B]
    bonus: torch.Tensor  # [B]
    tokens: torch.Tensor  # [B, P] after the path's nodes
    table: torch.Tensor  # [B, 1 + 2P] lengths, tokens and path, for one copy to the host
    committed: torch.Tensor  # [B] committed positions, these included
    last: torch.Tensor  # [B, P, D] last hidden states at the path's nodes
    taps: tuple[torch.Tensor, ...]  # [B, P, D] each
    hidden: torch.Tensor  # [B, D] last hidden state at the path's end


@dataclass(frozen=True)
class Outcome:
    """What a step commits: the accepted path of each row's tree, and a token after each node."""

    acceptance: Acceptance
    tokens: torch.Tensor  # [B, P] after the path's nodes
    features: Features  # [B, P, D] at the path's nodes
    new_tokens: list[list[int]]  # the tokens as lists of each row's accept length
    committed_lengths: torch.Tensor  # [B] committed positions, these included
    hidden: torch.Tensor  # [B, D] last hidden state at the path's end
    in_place: bool  # whether the path's cache columns already follow the committed ones

    @classmethod
    def of(cls, result: StepResult, table: list[list[int]], is_moved: bool) -> "Outcome":
        """A step's result with its `table` as lists; `is_moved` where the step has moved the path
        in the cache.
        """
        new_tokens, paths = read_table(table)
        # One row and the first nodes, in order: their columns already follow the committed ones.
        is_straight = len(paths) == 1 and paths[0] == list(range(len(paths[0])))
        return cls(
            Acceptance(result.path, result.length, result.bonus),
            result.tokens,
            Features(result.last, result.taps),
            new_tokens,
            result.committed,
            result.hidden,
            is_moved or is_straight,
        )

    @property
    def width(self) -> int:
        """The largest accept length."""
        return max(map(len, self.new_tokens))

    def readable(self) -> "Outcome":
        """This outcome with token 0 for NO_TOKEN, which no model can read, except in `new_tokens`.

        The batch refuses NO_TOKEN there, but not in rows that have ended and still run along.
        """
        if not any(NO_TOKEN in tokens for tokens in self.new_tokens):
            return self
        accepted = replace(self.acceptance, bonus=self.acceptance.bonus.clamp_min(0))
        return replace(self, acceptance=accepted, tokens=self.tokens.clamp_min(0))

    def committed(self, cache: TreeCache) -> Committed:
        """What drafters receive of it, with the target's cache."""
        accepted = self.acceptance
        ends = Ends(accepted.bonus, self.hidden)
        length, new_tokens = accepted.length, self.new_tokens
        return Committed(self.tokens, self.features, length, self.width, ends, new_tokens, cache)


@dataclass
class Launched:
    """A step that the device has been asked for; its tokens are read once they are needed."""

    result: StepResult
    table: Arriving  # of the result
    num_nodes: int  # of its tree, as it was proposed
    drafted: Sequence[int] = ()  # tokens that were proposed for each row
    late: LateTokens | None = None  # where it was committed before it was read
    outcome: Outcome | None = None  # once it was read

    def committed(self, cache: TreeCache) -> Committed:
        """What drafters receive of it while the device alone knows its tokens."""
        self.late, result = LateTokens(lambda: self.read().new_tokens), self.result
        # No model can read NO_TOKEN; a row that has it ends when the host reads it.
        ends = Ends(result.bonus.clamp_min(0), result.hidden)
        tokens, features = result.tokens.clamp_min(0), Features(result.last, result.taps)
        return Committed(tokens, features, result.length, None, ends, late=self.late, cache=cache)

    def read(self) -> Outcome:
        """What the step commits. This is the step's one synchronisation."""
        if self.outcome is None:
            self.outcome = Outcome.of(self.result, self.table.read(), is_moved=True)
            if self.late is not None:
                self.late.known = self.outcome.new_tokens
        return self.outcome


def settled(
    tree: TokenTree,
    accepted: Acceptance,
    features: Features,  # [B, N, D] of the pass
    lengths: torch.Tensor,  # [B] committed positions before it
) -> StepResult:
    """What a step commits when its rule has accepted a path of the tree."""
    path, length = accepted.path, accepted.length
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    # Places after a row's length hold node 0: what is gathered there is never read.
    on_path = features.map(lambda hidden: hidden[rows, path])
    end = path.gather(1, length[:, None] - 1)
    following = following_tokens(tree, accepted)
    assert features.last is not None and on_path.last is not None  # engines always keep it
    return StepResult(
        path,
        length,
        accepted.bonus,
        following,
        in_one_table(following, accepted),
        lengths + length,
        on_path.last,
        on_path.taps,
        features.last[rows, end].squeeze(1),
    )


def following_tokens(tree: TokenTree, acceptance: Acceptance) -> torch.Tensor:
    """The token [B, P] after each node of the accepted path.

    For root "a", accepted "b c" and bonus "d" the path is a b c and the tokens are b c d.
    """
    path_tokens = tree.tokens.gather(1, acceptance.path)
    last = acceptance.length[:, None] - 1
    # Rolled and not cut by its first: a compiled graph for any P has no dimension that may be 1.
    return path_tokens.roll(-1, dims=1).scatter(1, last, acceptance.bonus[:, None])


def in_one_table(
    tokens: torch.Tensor,  # [B, P]
    acceptance: Acceptance,
) -> torch.Tensor:
    """Accept lengths, tokens and paths as one tensor [B, 1 + 2P], for one copy to the host."""
    return torch.cat([acceptance.length[:, None], tokens, acceptance.path], dim=1)


def read_table(rows: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Of each row of a table [B, 1 + 2P] its tokens and its path, as lists of its accept length."""
    width = len(rows[0]) // 2
    new_tokens = [row[1 : 1 + row[0]] for row in rows]
    paths = [row[1 + width : 1 + width + row[0]] for row in rows]
    return new_tokens, paths


# Dimensions of the arguments of a step, but for those of the tokens.
STEP: dict[str, Spec] = {
    "parents": "B N",
    "depths": "B N",
    "ancestors": "B N N",
    "view": dims_of_view("N"),
    "draws": ("B .", "B N"),
}


class Draws(NamedTuple):
    """What the target's own tokens are drawn with."""

    settings: torch.Tensor  # [B, 4], see `SamplingConfig.settings`
    keys: torch.Tensor  # [B, depth + 1] of races, of which place d is for the nodes of depth d


class StepFunction:
    """The steps of a target that keep the same features and fill their trees in the same way."""

    def __init__(self, target: Target, features: FeatureSpec, filler: TokenFiller):
        self.target, self.filler = target, filler
        self.taps = Taps(target, features)
        dims = STEP | {"arguments": filler.dims}
        reads = features, filler.tokens, filler.dims, filler.reads
        self.call = target.pass_function(self._step, dims, self.taps, self._variant, reads)
        backend = target.backend
        self.move = backend.replacement_of(move_columns)
        self.draw = backend.fused(backend.replacement_of(draw))

    def __call__(
        self, recipe: TreeRecipe, cache: TreeCache, draws: Draws | None, whole: bool
    ) -> "Launched":
        """Verify the tree after the committed tokens, and move the accepted path next to them.

        The target's own tokens are its most probable ones, or draws with `draws`, which are `whole`
        where the settings are no more than a temperature. The caller still has to tell the cache
        how long the path is.
        """
        proposed = recipe.num_nodes
        recipe = recipe.padded(self.target.memory.size(proposed))
        if draws is not None:
            # One graph serves trees of all depths: it takes as many numbers as the tree has nodes.
            unused = recipe.num_nodes - draws.keys.shape[1]
            draws = draws._replace(keys=pad(draws.keys, (0, unused)))
        # A kernel reads from the settings whether more than a temperature is asked for.
        filtered = not whole and not self.target.backend.has_kernels
        result: StepResult = self.call(
            recipe.arguments,
            recipe.parents,
            recipe.depths,
            recipe.ancestors,
            cache.view(recipe.num_nodes, self.target.kernels),
            draws,
            filtered,
        )
        return Launched(result, Arriving(result.table), proposed)

    def _step(
        self,
        arguments: Sequence[torch.Tensor],  # of the filler
        parents: torch.Tensor,  # [B, N]
        depths: torch.Tensor,  # [B, N]
        ancestors: torch.Tensor,  # [B, N, N]
        view: CacheView,  # N columns
        draws: Draws | None,
        filtered: bool,
    ) -> StepResult:
        """The traced function; its results have one place for each node, whatever the depth."""
        # Within the graph, so that a small draft costs no call of its own.
        tokens = self.filler.tokens(*arguments)  # [B, N]
        if self.target.memory.is_recorded:
            # Filled up with zeros until here, and 0 is a token that could be right.
            tokens = tokens.masked_fill(parents == NO_NODE, NO_NODE)
        lengths, columns, kernels = view.lengths, view.room.columns, view.room.kernels
        positions = self.target.legal_positions(lengths[:, None] + depths)
        mask: LayerMasks
        if kernels is None:
            mask = additive(view.mask(ancestors), self.target.dtype)
        else:
            mask = kernels.masks(ancestors, lengths, columns[0])
        # Padding is embedded as token 0; being no real token, it is never accepted.
        logits = self.target.forward(tokens.clamp_min(0), positions, mask, StepCache.of(view))
        features = self.taps.features()
        # As deep as so many nodes can be: one graph then serves trees of all depths.
        most = tokens.shape[1] - 1
        tree = TokenTree(tokens, parents, depths, ancestors, max_depth=most, width=most)
        accepted = follow(tree, self._target_tokens(tree, logits, draws, filtered))
        path, length = accepted.path, accepted.length
        if tokens.shape != (1, 1):  # the column of a single root is the right one
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            places = lengths[:, None] + steps
            if kernels is not None:
                states = [*view.keys, *view.values]
                kernels.commit(states, path, length, lengths, columns[0])
            else:  # columns after the path stay where they are
                source = torch.where(steps < length[:, None], columns[path], places)
                self.move(view.keys, view.values, source, places)
        return settled(tree, accepted, features, lengths)

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
        view: CacheView,
        *_: object,
    ) -> tuple[bool, ...]:
        """Whether rows share their tables, and which layers look at a part of the columns only."""
        shared = (table.stride(0) == 0 for table in (parents, depths, ancestors))
        cut = (len(view.room.seen) > kind.reach for kind in self.target.layer_kinds)
        return *shared, *cut
