"""Chains drawn from distributions that the host knows, such as those of a table of n-grams."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from drafthead.heads.host import to_host
from drafthead.heads.sampling import RowRandom, SamplingConfig, draft_distribution, sample
from drafthead.heads.trees.tree import TokenTree, TreeShape

# Probabilities of the next token after some tokens, at least one; their sum may be below 1.
Distribution: TypeAlias = Callable[[Sequence[int]], Mapping[int, float]]
Support: TypeAlias = tuple[list[int], list[float]]  # different tokens, and their probabilities


def drawn_chain(
    texts: Sequence[Sequence[int]],
    distribution: Distribution,
    depth: int,
    sampling: SamplingConfig,
    random: RowRandom,
) -> TokenTree:
    """A chain of `depth` drawn tokens after each row's text, with what they were drawn from."""
    numbers = torch.tensor(to_host(random.uniform(depth)), dtype=torch.float64)  # [B, depth]
    rows = [list(text) for text in texts]
    supports: list[list[Support]] = [[] for _ in rows]
    for level in range(depth):
        known = [distribution(row) for row in rows]
        probs = draft_distribution(logits_of(known), sampling)
        places = sample(probs, numbers[:, level]).tolist()
        for number, (ids, place) in enumerate(zip(map(list, known), places, strict=True)):
            supports[number].append((ids, probs[number, : len(ids)].tolist()))
            rows[number].append(ids[place])
    # The last node has no children, but the tables have a row for it.
    ids_table, probs_table = support_tables([[*row, row[-1]] for row in supports])
    tokens = torch.tensor([row[-1 - depth :] for row in rows], device=random.device)
    shape, device = TreeShape.chain(depth), random.device
    return TokenTree.from_shape(shape, tokens, ids_table.to(device), probs_table.to(device))


def logits_of(known: Sequence[Mapping[int, float]]) -> torch.Tensor:
    """Logarithms of probabilities, float64 [B, k]; -inf where a row has fewer than another."""
    logs = [torch.tensor([*row.values()], dtype=torch.float64).log() for row in known]
    return pad_sequence(logs, batch_first=True, padding_value=-torch.inf)


def support_tables(
    supports: Sequence[Sequence[Support]],  # of each node of each row
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, N, k] both
    """Supports of different sizes as tables; what is missing are tokens of probability 0.

    They are tokens of other supports, so that all of one support are different.
    """
    every = [support for row in supports for support in row]
    most = max(len(ids) for ids, _ in every)
    known = sorted({token for ids, _ in every for token in ids})
    ids, probs = [], []
    for own, chances in every:
        missing = most - len(own)
        others = [token for token in known if token not in own][:missing] if missing else []
        ids.append([*own, *others])
        probs.append([*chances, *[0.0] * missing])
    shape = len(supports), len(supports[0]), most
    return torch.tensor(ids).view(shape), torch.tensor(probs, dtype=torch.float64).view(shape)
