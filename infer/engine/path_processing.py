"""Logits processors of transformers on every node of a token tree.

A processor such as a repetition penalty reads the tokens so far. At a node these are the prompt,
the committed answer and the node's own path, so one penalty for the whole tree would change the
output. Here each node is processed with its own path, as in `model.generate` on that path.

This needs the tree's tokens on the host: the step waits for the device once, and once more for
each depth. Without processors nothing here runs and nothing waits.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafthead.core.trees.tree import PADDING, TokenTree
from drafthead.infer.engine.batch_run import Row


@dataclass(frozen=True)
class Spot:
    """A node of the tree of one running row, and the drafted tokens on the way to it."""

    place: int  # in the running batch
    node: int
    path: tuple[int, ...]  # without the root, which is committed


@dataclass(frozen=True)
class PathProcessing:
    """Applies each row's processors to the logits after every node of a pass.

    Only nodes that can be accepted are processed. After an end token, at the limit, and after a
    token that the processors have just forbidden, the logits stay as they are and are never used.
    So a processor does not see a path that it has forbidden itself.
    """

    rows: Sequence[Row]  # of the running batch
    end_ids: frozenset[int]
    greedy: bool  # no row accepts a node that is not the most probable token

    def after_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed logits [B, V], float32, after the last token of each running row."""
        processed = logits[:, None].to(torch.float32, copy=True)
        self._process(self._roots(logits.device), processed)
        return processed[:, 0]

    def after_nodes(self, tree: TokenTree, logits: torch.Tensor) -> torch.Tensor:
        """Processed logits [B, N, V], float32, after each node of a tree, depth by depth."""
        processed = logits.to(torch.float32, copy=True)
        children = child_lists(tree)
        level = self._roots(logits.device)
        while level:
            self._process(level, processed)
            level = self._possible_children(level, children, processed)
        return processed

    def _roots(self, device: torch.device) -> list[Spot]:
        """The root of each row that needs more tokens; adds new tokens to the rows' pasts."""
        places = [place for place, row in enumerate(self.rows) if row.active]
        for place in places:
            row = self.rows[place]
            new = torch.tensor(row.tokens[len(row.past) - row.prefix_length :], dtype=torch.long)
            row.past = torch.cat([row.past.to(device), new.to(device)])
        return [Spot(place, 0, ()) for place in places]

    def _process(self, level: list[Spot], processed: torch.Tensor) -> None:
        """Change `processed` [B, N, V] at the spots of one depth, in one call for each length."""
        groups = defaultdict(list)
        for spot in level:
            row = self.rows[spot.place]
            groups[id(row.processors), len(row.past)].append(spot)
        for spots in groups.values():
            rows = [self.rows[spot.place] for spot in spots]
            paths = torch.tensor([spot.path for spot in spots], dtype=torch.long)  # [M, depth]
            past = torch.stack([row.past for row in rows])
            ids = torch.cat([past, paths.to(past.device)], dim=1)
            where = [spot.place for spot in spots], [spot.node for spot in spots]
            # transformers wants a LongTensor, which is a name for types alone.
            # Where they forbid every token, the node has no law: it is a leaf to every rule.
            scores = rows[0].processors(ids, processed[where])  # type: ignore[arg-type]
            processed[where] = scores

    def _possible_children(
        self,
        level: list[Spot],
        children: list[dict[int, list[tuple[int, int]]]],
        processed: torch.Tensor,  # [B, N, V]
    ) -> list[Spot]:
        """The children of a processed level that can be accepted and have a token after them."""
        parents, candidates = [], []
        for spot in level:
            row = self.rows[spot.place]
            if len(row.tokens) + len(spot.path) + 1 >= row.limit:
                continue
            for node, token in children[spot.place].get(spot.node, ()):
                if token != PADDING and token not in self.end_ids:
                    parents.append(spot.node)
                    candidates.append(Spot(spot.place, node, (*spot.path, token)))
        if not candidates:
            return []
        places = [spot.place for spot in candidates]
        tokens = torch.tensor([spot.path[-1] for spot in candidates], device=processed.device)
        if self.greedy:
            possible = processed[places, parents].argmax(-1) == tokens
        else:
            possible = processed[places, parents, tokens] > -torch.inf
        return [spot for spot, yes in zip(candidates, possible.tolist(), strict=True) if yes]


def child_lists(tree: TokenTree) -> list[dict[int, list[tuple[int, int]]]]:
    """For each row the (node, token) of every node's children.

    Parents (-1, 0, 0, 1) with tokens (9, 5, 6, 7) give {0: [(1, 5), (2, 6)], 1: [(3, 7)]}.
    """
    rows = torch.stack([tree.parents, tree.tokens], dim=1).tolist()
    lists = []
    for parents, tokens in rows:
        children = defaultdict(list)
        for node, parent in enumerate(parents[1:], 1):
            children[parent].append((node, tokens[node]))
        lists.append(dict(children))
    return lists
