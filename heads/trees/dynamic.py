"""EAGLE-2's dynamic tree (Li et al., 2024, arXiv 2406.16858): grown by the draft's own confidence.

The value of a node is the product of the draft's probabilities along its path, which estimates its
chance of being accepted. Each level opens the most valuable nodes of the level before; the most
valuable of all nodes seen make the tree. Everything is done for a batch at once, a tree a row.
"""

import torch

from drafthead.heads.trees.tree import TokenTree


class TreeGrowth:
    """The candidates for a batch of trees, numbered in the order of their depth.

    Use: `add_children` of the root; then, level by level, `open_best` and `add_children` of the
    opened nodes; `tree` at the end.
    """

    def __init__(self, roots: torch.Tensor):
        """`roots` [B] are the tokens of the roots."""
        self.roots = roots
        zeros = torch.zeros_like(roots[:, None])
        self.opened = zeros - 1  # [B, F] numbers of the open candidates; -1 is the root
        self.opened_scores = zeros.float()  # [B, F] logs of their values
        # One tensor [B, candidates] a level.
        self.scores: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self.parents: list[torch.Tensor] = []  # candidate numbers, -1 for the root

    def add_children(
        self,
        log_probs: torch.Tensor,  # [B, F, k] float32
        tokens: torch.Tensor,  # [B, F, k]
    ) -> None:
        """Give each open node k children, with the draft's log-probability of each."""
        # Rounding must not make a child more valuable than its parent: see `tree`.
        scores = self.opened_scores[..., None] + log_probs.clamp_max(0)
        self.scores.append(scores.flatten(1))
        self.tokens.append(tokens.flatten(1))
        self.parents.append(self.opened[..., None].expand_as(tokens).flatten(1))

    def open_best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Open the `count` most valuable nodes of the deepest level.

        Returns their tokens [B, F] and the places [B, F] of their parents among the nodes that
        were open until now.
        """
        width = self.scores[-1].shape[1] // self.opened.shape[1]
        order = self.scores[-1].sort(dim=1, descending=True, stable=True).indices[:, :count]
        before = sum(level.shape[1] for level in self.scores[:-1])
        self.opened = order + before
        self.opened_scores = self.scores[-1].gather(1, order)
        return self.tokens[-1].gather(1, order), order // width

    def tree(self, num_nodes: int) -> TokenTree:
        """The trees of the most valuable candidates, at most `num_nodes` nodes with the root.

        Of equals the one with the lower number comes first. A child is never more valuable than its
        parent and has a higher number, so no node is chosen without its parent. With candidates 0
        and 1 under the root of values .6 and .4, and 2 and 3 under candidate 0 of values .6 and 0,
        three nodes are the root, 0 and 2, with parents (-1, 0, 1).
        """
        scores, tokens, parents = (
            torch.cat(levels, dim=1) for levels in (self.scores, self.tokens, self.parents)
        )
        order = scores.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : num_nodes - 1].sort(dim=1).values  # [B, N - 1] candidate numbers
        # node[1 + c] is the node that candidate c became; the root is number -1, so node[0] = 0.
        node = torch.zeros_like(scores[:, :1], dtype=torch.long).repeat(1, 1 + scores.shape[1])
        nodes = torch.arange(1, 1 + chosen.shape[1], device=chosen.device).expand_as(chosen)
        node.scatter_(1, 1 + chosen, nodes)
        kept_parents = node.gather(1, 1 + parents.gather(1, chosen))
        kept_tokens = tokens.gather(1, chosen)
        width = self.scores[0].shape[1]
        return TokenTree.from_parents(
            torch.cat([self.roots[:, None], kept_tokens], dim=1),
            torch.cat([torch.full_like(self.roots[:, None], -1), kept_parents], dim=1),
            max_depth=len(self.scores),
            width=min(width, num_nodes - 1),
        )
