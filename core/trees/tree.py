"""Token trees: what a drafter proposes and the target verifies in one pass.

Node 0 is the last committed token, and a parent always comes before its children. A chain is the
tree whose parents are -1, 0, 1, 2, ...
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.core.errors import UserError

Path = tuple[int, ...]

PADDING = -1
# The token and the parent of a node that only fills up a tree. No token is equal to it: PADDING
# is what a model with NaN logits gives, NO_TOKEN.
NO_NODE = -2
# Acceptance of each depth, given the depth before, that is assumed of an unmeasured drafter.
UNMEASURED_ALPHA = 0.6


def ancestor_mask(parents: torch.Tensor, max_depth: int | None = None) -> torch.Tensor:
    """The attention of nodes, [..., N, N] bool: true where m is node n or an ancestor of n.

    `parents` [..., N]. To know that no node is deeper than `max_depth` saves work.

    For parents (-1, 0, 0, 1) node 3 hangs under node 1::

        1 . . .
        1 1 . .
        1 . 1 .
        1 1 . 1
    """
    num_nodes = parents.shape[-1]
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
    mask = mask.expand(*parents.shape, num_nodes)
    # `above` is the ancestor 2^i places up, or the root; `mask` holds the 2^i nearest of each path.
    above = parents.clamp_min(0)
    for _ in range((num_nodes - 1 if max_depth is None else max_depth).bit_length()):
        mask = mask | mask.gather(-2, above[..., None].expand(mask.shape))
        above = above.gather(-1, above)
    return mask


@dataclass(frozen=True)
class Budget:
    """The most that one step's tree may have: nodes, the root included, and drafted tokens a path.

    A draft that takes a pass for each level may stop where a further level is accepted with less
    than `least_chance`. Budgets that differ in nothing but what is believed of them are equal.
    Raises UserError for a tree that would propose nothing.
    """

    nodes: int
    depth: int
    least_chance: float = field(default=0.0, compare=False, repr=False)
    # How likely such a tree is accepted to depth 1, 2, ..., as far as known before decoding;
    # without measurements, each depth in UNMEASURED_ALPHA of the cases of the depth before.
    chances: tuple[float, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.depth < 1:
            raise UserError(
                f"a token tree needs at least 2 nodes (the root and a guess), got {self.nodes} "
                f"nodes and depth {self.depth}"
            )
        if not self.chances:
            assumed = (UNMEASURED_ALPHA**depth for depth in range(1, self.depth + 1))
            # The class is frozen, and this default follows from other fields.
            object.__setattr__(self, "chances", tuple(assumed))

    def __lt__(self, other: "Budget") -> bool:
        """Whether this one is the smaller."""
        return (self.nodes, self.levels) < (other.nodes, other.levels)

    @property
    def levels(self) -> int:
        """The most levels that a model drafts."""
        return self.depth

    def of_nodes(self, nodes: int) -> "Budget":
        """A budget of the same kind with so many nodes."""
        return Budget(nodes, min(self.depth, max(1, nodes - 1)))


@dataclass(frozen=True)
class Free(Budget):
    """The budget of a draft that costs no pass of a model: a path may take all of its nodes."""

    levels = 0
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", self.nodes - 1)  # the class is frozen
        super().__post_init__()

    def of_nodes(self, nodes: int) -> "Free":
        return Free(nodes)


free_budget = cache(Free)  # one object each, as they are asked for at every step


@dataclass(frozen=True)
class TreeShape:
    """The form of a static tree: under which parent each node hangs, and as which child.

    `paths` holds one tuple of child ranks a node, without the root: (0,) is the best child of the
    root, (0, 2) the third-best child of that node. Shapes are built by `from_paths`, which orders
    them, and by `chain`.
    """

    paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "TreeShape":
        """Order the paths by depth and ranks.

        Better-ranked siblings may be missing: (0,) (2,) takes the best and the third-best guess.
        Raises UserError for a repeated path, a negative rank, or a node whose parent is missing.
        """
        # By depth, so that parents come before children; then by rank, so that siblings stand in
        # the order in which guesses were made.
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        known = set(ordered) | {()}
        if len(known) != len(ordered) + 1:
            raise UserError("a token tree lists the same path twice, or the root")
        for path in ordered:
            if min(path) < 0:
                raise UserError(f"token tree path {path} has a negative rank")
            if path[:-1] not in known:
                raise UserError(f"token tree path {path} needs {path[:-1]}, which is missing")
        return cls(tuple(ordered))

    @classmethod
    def chain(cls, depth: int) -> "TreeShape":
        """The tree of width 1 with `depth` drafted tokens."""
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    @property
    def num_nodes(self) -> int:
        """Number N of nodes, the root included."""
        return len(self.paths) + 1

    @property
    def budget(self) -> Budget:
        """The smallest budget that this tree fits."""
        return Budget(self.num_nodes, self.depth)

    @property
    def depth(self) -> int:
        """The most drafted tokens on one path."""
        return len(self.paths[-1]) if self.paths else 0

    @cached_property
    def parents(self) -> torch.Tensor:
        """Parent of each node, [N] with -1 for the root."""
        index = {(): 0} | {path: n for n, path in enumerate(self.paths, 1)}
        return torch.tensor([-1, *(index[path[:-1]] for path in self.paths)])

    @cached_property
    def depths(self) -> torch.Tensor:
        """Depth of each node, [N]; the root has 0."""
        return torch.tensor([0, *map(len, self.paths)])

    @cached_property
    def ranks(self) -> torch.Tensor:
        """The number of each node among its parent's children, [N]; the root counts as 0."""
        return torch.tensor([0, *(path[-1] for path in self.paths)])

    @cached_property
    def gapless(self) -> "TreeShape":
        """This tree with every node's children ranked 0, 1, ..., as children are drawn.

        Drawn children come in the order of the draws, and no draw may be left out. The paths
        (0,) (2,) (2, 1) become (0,) (1,) (1, 0).
        """
        renamed: dict[Path, Path] = {(): ()}
        taken: Counter[Path] = Counter()
        for path in self.paths:
            above = path[:-1]
            renamed[path] = (*renamed[above], taken[above])
            taken[above] += 1
        return TreeShape(tuple(renamed[path] for path in self.paths))

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """`ancestor_mask` of the parents, [N, N]."""
        return ancestor_mask(self.parents)

    def tables(
        self, rows: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parents [B, N], depths [B, N] and ancestors [B, N, N] for a batch; made once."""
        known = self._tables  # once: two threads may each have made this dictionary
        if (rows, device) not in known:
            of_a_row = (self.parents, self.depths, self.ancestors)
            parents, depths, ancestors = (
                table.to(device).expand(rows, *table.shape) for table in of_a_row
            )
            known[rows, device] = parents, depths, ancestors
        return known[rows, device]

    @cached_property
    def _tables(
        self,
    ) -> dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def width(self) -> int:
        """The most guesses that the children of one node are chosen from."""
        return max((path[-1] + 1 for path in self.paths), default=0)


ROOT = TreeShape(())  # a tree that proposes nothing


@dataclass(frozen=True)
class TokenTree:
    """A batch of proposals of the same number of nodes.

    Siblings are different tokens. Nodes whose token is PADDING fill up rows that propose less than
    the others; they are never accepted.

    `draft_ids` and `draft_probs` are the distributions that each node's children were drawn from,
    in the order of their node index and without replacement, on a support of k different tokens;
    None when the children were chosen and not drawn.
    """

    tokens: torch.Tensor  # [B, N], PADDING for no token
    parents: torch.Tensor  # [B, N], -1 for the root
    depths: torch.Tensor  # [B, N]
    ancestors: torch.Tensor  # [B, N, N] bool
    max_depth: int
    width: int
    draft_ids: torch.Tensor | None = None  # [B, N, k]
    draft_probs: torch.Tensor | None = None  # [B, N, k], sums to 1
    # [B, N] logarithms of the draft's own guess of how likely each node is accepted, if it has one;
    # a child's is never above its parent's, and the root's is 0.
    scores: torch.Tensor | None = None

    @classmethod
    def from_shape(
        cls,
        shape: TreeShape,
        tokens: torch.Tensor,  # [B, N]
        draft_ids: torch.Tensor | None = None,  # [B, N, k]
        draft_probs: torch.Tensor | None = None,  # [B, N, k]
        scores: torch.Tensor | None = None,  # [B, N], or [N] for all rows
    ) -> "TokenTree":
        """A tree of the given shape on the device of `tokens`."""
        tables = shape.tables(tokens.shape[0], tokens.device)
        if scores is not None:
            scores = scores.expand(tokens.shape)
        return cls(tokens, *tables, shape.depth, shape.width, draft_ids, draft_probs, scores)

    @property
    def num_nodes(self) -> int:
        """Number N of nodes, the root included."""
        return self.tokens.shape[1]

    def padded(self, nodes: int) -> "TokenTree":
        """This tree padded to `nodes` nodes. Padding nodes attend only to themselves.

        Tables of two nodes, padded to four::

            parents -1 0 -2 -2     depths 0 1 0 0     ancestors  1 . . .
                                                                 1 1 . .
                                                                 . . 1 .
                                                                 . . . 1
        """
        missing = nodes - self.num_nodes
        if missing == 0:
            return self
        places = torch.arange(nodes, device=self.parents.device)
        itself = (places[:, None] == places) & (places >= self.num_nodes)
        return replace(
            self,
            tokens=pad(self.tokens, (0, missing), value=NO_NODE),
            parents=of_stored(self.parents, lambda t: pad(t, (0, missing), value=NO_NODE)),
            depths=of_stored(self.depths, lambda t: pad(t, (0, missing))),
            ancestors=of_stored(self.ancestors, lambda t: pad(t, (0, missing) * 2) | itself),
            scores=None,
        )


def of_stored(table: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The table [B, ...] changed row by row; rows that are all one stay that."""
    if table.stride(0) != 0:
        return change(table)
    changed = change(table[:1])
    return changed.expand(len(table), *changed.shape[1:])


class TreeTables(NamedTuple):
    """The tables of trees that differ from row to row. Tensors alone, for recorded drafts."""

    tokens: torch.Tensor  # [B, N]
    parents: torch.Tensor  # [B, N], -1 for the root, which is node 0
    depths: torch.Tensor  # [B, N]
    ancestors: torch.Tensor  # [B, N, N]
    scores: torch.Tensor  # [B, N]

    @classmethod
    def of(
        cls,
        tokens: torch.Tensor,  # [B, N]
        parents: torch.Tensor,  # [B, N]
        scores: torch.Tensor,  # [B, N]
        levels: int,
    ) -> "TreeTables":
        """The tables of trees in which no node is deeper than `levels`."""
        ancestors = ancestor_mask(parents, levels)
        # A row of the mask holds the node and its ancestors: one more than its depth.
        return cls(tokens, parents, ancestors.sum(-1) - 1, ancestors, scores)

    def tree(self, levels: int, width: int) -> TokenTree:
        """The trees, whose nodes have at most `width` children, which were not drawn."""
        most = self.tokens.shape[1] - 1
        tables = self.tokens, self.parents, self.depths, self.ancestors
        return TokenTree(*tables, min(levels, most), min(width, most), scores=self.scores)
