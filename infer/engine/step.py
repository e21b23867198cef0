"""A step after its draft: the pass over a tree, the verdict, and what is committed.

`settled` is what a step commits of a pass, under any rule. `StepFunction` is a whole step as one
function, which a backend records, under the rules that accept the target's own tokens (`greedy` and
`match`). Its parts are short: a dozen separate calls would cost more than their work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.core.drafting.drafter import Committed, Ends, LateTokens
from drafthead.core.host import Arriving
from drafthead.core.kv_cache.column_cache import CacheView, additive, move_columns
from drafthead.core.sampling import draw, most_probable
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.hooks import Taps
from drafthead.core.target.masks import LayerMasks
from drafthead.core.target.target import Target, TargetOutput
from drafthead.core.target.tree_cache import StepCache, TreeCache
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.verifiers.base import Acceptance, follow


class StepResult(NamedTuple):
    """The tensors that a step commits; paths of N places serve trees of any depth."""

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
    """The outcome of a step, once the host knows it."""

    acceptance: Acceptance
    new_tokens: list[list[int]]  # after the path's nodes, as lists of each row's accept length
    in_place: bool  # whether the path's cache columns already follow the committed ones

    @property
    def width(self) -> int:
        """The largest accept length."""
        return max(map(len, self.new_tokens))


class Scored(NamedTuple):
    """A tree that a pass has scored, for whoever asks for the scores."""

    tree: TokenTree
    output: TargetOutput
    scores: torch.Tensor  # [B, N, V] the logits after the logits processors


@dataclass
class Launched:
    """A step that the device has been asked for; its tokens are read once they are needed."""

    result: StepResult
    num_nodes: int  # of its tree, as it was proposed
    drafted: Sequence[int] = ()  # tokens that were proposed for each row
    scored: Scored | None = None  # of a step in calls, which leaves the path where it is
    late: LateTokens | None = None  # where it was committed before it was read
    outcome: Outcome | None = None  # once it was read

    def __post_init__(self) -> None:
        self.table = Arriving(self.result.table)

    def committed(self, cache: TreeCache) -> Committed:
        """The part of it that drafters receive, with the target's cache.

        Its tokens come late where the device alone knows them as yet.
        """
        result, outcome = self.result, self.outcome
        # No model can read NO_TOKEN; a row that has it ends when the host reads it.
        tokens, ends = result.tokens.clamp_min(0), Ends(result.bonus.clamp_min(0), result.hidden)
        given = tokens, Features(result.last, result.taps), result.length
        if outcome is not None:
            return Committed(*given, outcome.width, ends, outcome.new_tokens, cache)
        self.late = LateTokens(lambda: self.read().new_tokens)
        return Committed(*given, None, ends, late=self.late, cache=cache)

    def read(self) -> Outcome:
        """The outcome of the step. This is the step's one synchronisation."""
        if self.outcome is None:
            result, (new_tokens, paths) = self.result, read_table(self.table.read())
            # One row, the first nodes, in order: their columns already follow the committed ones.
            is_straight = len(paths) == 1 and paths[0] == list(range(len(paths[0])))
            accepted = Acceptance(result.path, result.length, result.bonus)
            in_place = self.scored is None or is_straight
            self.outcome = Outcome(accepted, new_tokens, in_place)
            if self.late is not None:
                self.late.known = new_tokens
        return self.outcome


def settled(
    tree: TokenTree,
    accepted: Acceptance,
    features: Features,  # [B, N, D] of the pass
    lengths: torch.Tensor,  # [B] committed positions before it
) -> StepResult:
    """The result of a step whose rule has accepted a path of the tree."""
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
    # What is rolled to the end is overwritten there, or never read.
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


class Draws(NamedTuple):
    """Settings and random numbers that the target's own tokens are drawn with."""

    settings: torch.Tensor  # [B, 4], see `SamplingConfig.settings`
    keys: torch.Tensor  # [B, depth + 1] of races, of which place d is for the nodes of depth d


class StepFunction:
    """The steps of a target that keep the same features."""

    def __init__(self, target: Target, features: FeatureSpec):
        self.target = target
        self.taps = Taps(target, features)
        self.call = target.pass_function(self._step, self.taps)
        self.draw = target.backend.fused(target.backend.replacement_of(draw))

    def __call__(
        self, tree: TokenTree, cache: TreeCache, draws: Draws | None, whole: bool
    ) -> "Launched":
        """Verify the tree after the committed tokens, and move the accepted path next to them.

        The target's own tokens are its most probable ones, or draws with `draws`, which are `whole`
        where the settings are no more than a temperature. The caller still has to tell the cache
        how long the path is.
        """
        proposed = tree.num_nodes
        tree = tree.padded(self.target.memory.size(proposed))
        if draws is not None:
            # One graph serves trees of all depths: it takes as many numbers as the tree has nodes.
            unused = tree.num_nodes - draws.keys.shape[1]
            draws = draws._replace(keys=pad(draws.keys, (0, unused)))
        result: StepResult = self.call(
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.ancestors,
            cache.view(tree.num_nodes, self.target.kernels),
            draws,
            not whole,
        )
        return Launched(result, proposed)

    def _step(
        self,
        tokens: torch.Tensor,  # [B, N]
        parents: torch.Tensor,  # [B, N]
        depths: torch.Tensor,  # [B, N]
        ancestors: torch.Tensor,  # [B, N, N]
        view: CacheView,  # N columns
        draws: Draws | None,
        filtered: bool,
    ) -> StepResult:
        """The recorded function; its results have one place for each node, whatever the depth."""
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
                move_columns(view.keys, view.values, source, places)
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
        return self.draw(logits, keys, draws.settings, filtered)
