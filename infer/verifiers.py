"""Acceptance rules: which path of a token tree the target accepts, and the token behind it.

Pure functions on tensors; they know no model and no cache. `scores` are the target's logits where
a rule needs no more (`reads="logits"`) and its probabilities otherwise. Rules marked lossy change
the output distribution and are never chosen unless the user names them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import RowRandom, sample
from drafthead.heads.tree import TokenTree

# Medusa's typical acceptance: a token passes above min(EPSILON, DELTA x exp(-entropy)).
TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row, beginning with the root, and the target's own next token.

    `length` counts the root and the accepted nodes; as the root was committed before and the bonus
    is new, it is also the number of tokens that the pass commits.
    """

    path: torch.Tensor  # [B, max_depth + 1] node indices; 0 behind a row's length
    length: torch.Tensor  # [B], 1 to max_depth + 1
    bonus: torch.Tensor  # [B]


class Rule(Protocol):
    """The signature of an acceptance rule."""

    def __call__(
        self, tree: TokenTree, scores: torch.Tensor, random: RowRandom | None
    ) -> Acceptance:
        """Accept a path of `tree` given scores [B, N, V]."""
        ...


@dataclass(frozen=True)
class Verifier:
    """An acceptance rule and what the engine must know of it."""

    name: str
    rule: Rule
    lossless: bool
    reads: Literal["logits", "probs"]
    greedy: bool  # only for temperature 0; the others only for temperatures above it
    draws_children: bool  # whether it gains from children drawn from the draft's distribution


VERIFIERS: dict[str, Verifier] = {}


def register_verifier(
    name: str,
    *,
    lossless: bool,
    reads: Literal["logits", "probs"],
    greedy: bool = False,
    draws_children: bool = False,
) -> Callable[[Rule], Rule]:
    """Make a rule known by name; raises ValueError when the name is taken."""

    def register(rule: Rule) -> Rule:
        if name in VERIFIERS:
            raise ValueError(f"two verifiers are called {name!r}")
        VERIFIERS[name] = Verifier(name, rule, lossless, reads, greedy, draws_children)
        return rule

    return register


def verifier_for(name: str, temperature: float) -> Verifier:
    """The verifier called `name`; `auto` is the lossless one for the temperature.

    Raises UserError for an unknown name, or a rule that does not exist at this temperature.
    """
    if name == "auto":
        name = "greedy" if temperature == 0 else "rejection"
    if name not in VERIFIERS:
        known = ", ".join(["auto", *sorted(VERIFIERS)])
        raise UserError(f"unknown verifier {name!r}; known verifiers: {known}")
    verifier = VERIFIERS[name]
    if verifier.greedy and temperature > 0:
        raise UserError(
            f"verifier {name!r} would ignore temperature {temperature}: use rejection, or "
            "temperature 0"
        )
    if not verifier.greedy and temperature == 0:
        raise UserError(
            f"verifier {name!r} needs a temperature above 0: use greedy for temperature 0"
        )
    return verifier


def path_to(tree: TokenTree, node: torch.Tensor, bonus: torch.Tensor) -> Acceptance:
    """The acceptance of everything from the root to node [B]."""
    batch = torch.arange(node.shape[0], device=node.device)
    on_path = tree.ancestors[batch, node]  # [B, N]
    indices = torch.arange(tree.num_nodes, device=node.device).expand_as(on_path)
    # Each depth has one node on the path; the others are scattered into a column that is cut off.
    column = torch.where(on_path, tree.depths, tree.max_depth + 1)
    path = indices.new_zeros(node.shape[0], tree.max_depth + 2).scatter_(1, column, indices)
    return Acceptance(path[:, :-1], on_path.sum(1), bonus)


def deepest(tree: TokenTree, passes: torch.Tensor, preference: torch.Tensor) -> torch.Tensor:
    """The deepest node [B] whose path passes [B, N] throughout, by preference [B, N] in [0, 1)."""
    reached = (passes[:, None, :] | ~tree.ancestors).all(-1)
    return torch.where(reached, tree.depths + preference, -1.0).argmax(1)


@register_verifier("greedy", lossless=True, reads="logits", greedy=True)
def greedy(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Accept a node when it is the target's most probable token behind its parent."""
    best = scores.float().argmax(-1)  # [B, N]; a CPU searches 16-bit numbers four times slower
    passes = tree.tokens == best.gather(1, tree.parents.clamp_min(0))
    passes[:, 0] = True
    node = deepest(tree, passes, torch.zeros_like(passes, dtype=torch.float32))
    return path_to(tree, node, best.gather(1, node[:, None]).squeeze(1))


@register_verifier("typical", lossless=False, reads="probs")
def typical(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Lossy: Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1).

    A node x passes when target_probs(x) > min(epsilon, delta x exp(-H(target_probs))). The longest
    passing path wins, among equals the most probable; the bonus is drawn from the target.
    """
    assert random is not None
    entropy = -(scores * scores.clamp_min(1e-10).log()).sum(-1)  # [B, N]
    threshold = (TYPICAL_DELTA * torch.exp(-entropy)).clamp_max(TYPICAL_EPSILON)
    parents = tree.parents.clamp_min(0)
    token_probs = scores.gather(1, parents[..., None].expand_as(scores))
    token_probs = token_probs.gather(2, tree.tokens.clamp_min(0)[..., None]).squeeze(2)  # [B, N]
    passes = (token_probs > threshold.gather(1, parents)) & (tree.tokens >= 0)
    passes[:, 0] = token_probs[:, 0] = 1
    path_log_probs = (token_probs.clamp_min(1e-10).log()[:, None] * tree.ancestors).sum(-1)
    node = deepest(tree, passes, path_log_probs.exp() * 0.999)
    rows = torch.arange(node.shape[0], device=node.device)
    return path_to(tree, node, sample(scores[rows, node], random.uniform()))


@register_verifier("rejection", lossless=True, reads="probs", draws_children=True)
def rejection(tree: TokenTree, scores: torch.Tensor, random: RowRandom | None) -> Acceptance:
    """Exact: recursive rejection sampling of children drawn without replacement.

    At each node the children are tried in the order in which they were drawn. Child x is accepted
    with probability min(1, target(x) / draft(x)); otherwise target <- norm(max(target - draft, 0)),
    draft <- draft without x, renormalised (Jeon et al., 2024, arXiv 2402.14160; Yang et al., 2024,
    arXiv 2401.15077). If none is left the bonus is drawn from what remains of the target. A chain
    makes this Leviathan's and Chen's rule. Children that were not drawn count as drawn with
    certainty, which is the same as drawing from the target and looking whether it was proposed.
    """
    assert random is not None
    # The bonus takes the first number: a longer tree then leaves the others' places unchanged.
    uniform = random.uniform(1 + tree.max_depth * tree.width)  # [B, 1 + depth x width]
    rows = torch.arange(scores.shape[0], device=scores.device)
    node = torch.zeros_like(rows)
    walk = _Residual.at(tree, scores, node)
    moving = torch.ones_like(rows, dtype=torch.bool)
    for depth in range(tree.max_depth):
        start = node
        for rank in range(tree.width):
            child = child_of(tree, start, rank)  # [B], -1 where there is none
            trying = moving & (node == start) & (child >= 0)
            coin = uniform[:, 1 + depth * tree.width + rank]
            token = tree.tokens[rows, child.clamp_min(0)]
            accepted = trying & walk.accepts(token, coin)
            walk.reject(token, trying & ~accepted)
            node = torch.where(accepted, child, node)
        moved = node != start
        walk.enter(_Residual.at(tree, scores, node), moved)
        moving = moving & moved
        if scores.device.type == "cpu" and not moving.any():
            break  # free on a CPU; on a GPU it would cost a synchronisation
    return path_to(tree, node, sample(walk.target(scores[rows, node]), uniform[:, 0]))


def child_of(tree: TokenTree, node: torch.Tensor, rank: int) -> torch.Tensor:
    """Index [B] of the rank-th child of node [B], in the order of node indices; -1 if none."""
    is_child = tree.parents == node[:, None]  # [B, N]
    wanted = is_child & (is_child.cumsum(1) == rank + 1)
    return torch.where(wanted.any(1), wanted.int().argmax(1), -1)


class _Residual:
    """What remains of target and draft at one node a row, on a support of k tokens.

    Rejections only subtract draft mass, so outside the support the target keeps its proportions and
    one factor a row describes it.
    """

    def __init__(
        self,
        ids: torch.Tensor,  # [B, k] support, without repetitions where the target has mass
        draft: torch.Tensor | None,  # [B, k]; None for children that were not drawn
        target: torch.Tensor,  # [B, k] target probabilities on the support
    ):
        self.ids, self.draft, self.on_support = ids, draft, target
        self.outside = (1 - target.sum(-1)).clamp_min(0)  # [B] target mass outside the support
        self.scale = torch.ones_like(self.outside)  # by which probabilities outside have grown

    @classmethod
    def at(cls, tree: TokenTree, scores: torch.Tensor, node: torch.Tensor) -> "_Residual":
        """Fresh target and draft distributions of node [B]; scores [B, N, V]."""
        rows = torch.arange(node.shape[0], device=node.device)
        target_probs = scores[rows, node]
        if tree.draft_ids is not None and tree.draft_probs is not None:
            ids = tree.draft_ids[rows, node]
            return cls(ids, tree.draft_probs[rows, node], target_probs.gather(1, ids))
        children = [child_of(tree, node, rank).clamp_min(0) for rank in range(max(tree.width, 1))]
        ids = tree.tokens[rows[:, None], torch.stack(children, 1)].clamp_min(0)
        return cls(ids, None, target_probs.gather(1, ids) * first_occurrences(ids))

    def _draft_of(self, here: torch.Tensor) -> torch.Tensor:
        """The distribution [B, k] from which the token marked in `here` [B, k] was drawn."""
        return here.float() if self.draft is None else self.draft

    def accepts(self, token: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
        """Whether token [B] passes: coin [B] x draft(token) < target(token)."""
        here = self.ids == token[:, None]
        draft = (self._draft_of(here) * here).amax(1)
        return (coin * draft < (self.on_support * here).sum(1)) & (draft > 0)

    def reject(self, token: torch.Tensor, rows: torch.Tensor) -> None:
        """Take the rejected token [B] out of target and draft, in the rows [B] where it was."""
        here = self.ids == token[:, None]
        left = (self.on_support - self._draft_of(here)).clamp_min(0)
        mass = left.sum(1) + self.outside
        # Without mass (draft and target agree but for rounding) the target stays as it is.
        changed = rows & (mass > 0)
        mass = torch.where(changed, mass, 1)
        self.on_support = torch.where(changed[:, None], left / mass[:, None], self.on_support)
        self.outside, self.scale = self.outside / mass, self.scale / mass
        if self.draft is not None:
            draft = self.draft.masked_fill(here & rows[:, None], 0)
            tiny = torch.finfo(draft.dtype).tiny
            self.draft = draft / draft.sum(1, keepdim=True).clamp_min(tiny)

    def enter(self, other: "_Residual", rows: torch.Tensor) -> None:
        """Continue with another node's distributions in the rows [B]."""
        self.ids = torch.where(rows[:, None], other.ids, self.ids)
        self.on_support = torch.where(rows[:, None], other.on_support, self.on_support)
        self.outside = torch.where(rows, other.outside, self.outside)
        self.scale = torch.where(rows, other.scale, self.scale)
        if self.draft is not None and other.draft is not None:
            self.draft = torch.where(rows[:, None], other.draft, self.draft)

    def target(self, target_probs: torch.Tensor) -> torch.Tensor:
        """What remains [B, V] of the node's target probabilities [B, V], unnormalised."""
        remaining = target_probs * self.scale[:, None]
        kept = self.on_support * first_occurrences(self.ids)
        remaining = remaining.scatter(1, self.ids, 0).scatter_add(1, self.ids, kept)
        nothing_left = remaining.sum(1, keepdim=True) <= 0  # by rounding alone
        return torch.where(nothing_left, target_probs, remaining)


def first_occurrences(ids: torch.Tensor) -> torch.Tensor:
    """Which entries [B, k] do not repeat an earlier one of their row: (7, 3, 7) -> (1, 1, 0)."""
    same = ids[:, :, None] == ids[:, None, :]
    return ~same.tril(-1).any(-1)
