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
from transformers.generation.logits_process import LogitsProcessorList

from drafthead.core.trees.tree import PADDING, TokenTree
from drafthead.infer.engine.batch_run import Batch


@dataclass(frozen=True)
class Spot:
    """A node of the tree of one running row, and the drafted tokens on the way to it."""

    place: int  # in the running batch
    node: int
    path: tuple[int, ...]  # without the root, which is committed


class PathProcessing:
    """Applies each row's processors to the logits after every node of a pass.

    Only nodes that can be accepted are processed. After an end token, at the limit, and after a
    token that the processors have just forbidden, the logits stay as they are and are never used.
    So a processor does not see a path that it has forbidden itself.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessorList],  # of each prompt
        prompts: Sequence[Sequence[int]],
        batch: Batch,
        greedy: bool,
    ):
        """With `greedy` no row accepts a node that is not the most probable token."""
        self.processors, self.batch, self.greedy = processors, batch, greedy
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.pasts = [torch.tensor(list(prompt)) for prompt in prompts]  # prompt and answer, [T]

    def join(self, other: "PathProcessing", order: Sequence[int]) -> None:
        """Go on with rows of both, as in `Batch.join`; called before it."""
        both = [(part, number) for part in (self, other) for number in part.batch.running]
        pairs = [both[row] for row in order]
        self.greedy &= other.greedy
        self.processors = [part.processors[number] for part, number in pairs]
        self.prompt_lengths = [part.prompt_lengths[number] for part, number in pairs]
        self.pasts = [part.pasts[number] for part, number in pairs]

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
        """The root of each row that needs more tokens; adds the new tokens to the rows' pasts."""
        places = [place for place, row in enumerate(self.batch.running_rows()) if row.active]
        for place in places:
            number = self.batch.running[place]
            past = self.pasts[number].to(device)
            known = len(past) - self.prompt_lengths[number]
            new = torch.tensor(self.batch.rows[number].tokens[known:], dtype=past.dtype)
            self.pasts[number] = torch.cat([past, new.to(device)])
        return [Spot(place, 0, ()) for place in places]

    def _process(self, level: list[Spot], processed: torch.Tensor) -> None:
        """Change `processed` [B, N, V] at the spots of one depth, in one call for each length."""
        groups = defaultdict(list)
        for spot in level:
            number = self.batch.running[spot.place]
            groups[id(self.processors[number]), len(self.pasts[number])].append(spot)
        for spots in groups.values():
            numbers = [self.batch.running[spot.place] for spot in spots]
            paths = torch.tensor([spot.path for spot in spots], dtype=torch.long)  # [M, depth]
            past = torch.stack([self.pasts[number] for number in numbers])
            ids = torch.cat([past, paths.to(past.device)], dim=1)
            where = [spot.place for spot in spots], [spot.node for spot in spots]
            # transformers wants a LongTensor, which is a name for types alone.
            # Where they forbid every token, the node has no law: it is a leaf to every rule.
            scores = self.processors[numbers[0]](ids, processed[where])  # type: ignore[arg-type]
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
            row = self.batch.rows[self.batch.running[spot.place]]
            if len(row.tokens) + len(spot.path) + 1 >= row.limit:
                continue
            for node, token in children[spot.place].get(spot.node, ()):
                if token != PADDING and token not in self.batch.end_ids:
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
