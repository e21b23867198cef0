"""Drafts that guess with the numbers with which the target will draw.

The target draws a token as the winner of a race (`sampling.race`) whose random numbers follow from
the row's seed and the token's position alone. A draft that holds the same race with its own
probabilities mostly has the same winner: with the chance sum over x of
1 / sum over y of max(p_y / p_x, q_y / q_x), which lies between (1 - TV) / (1 + TV) and 1 - TV, for
TV the total variation between target p and draft q (Daliri et al., 2024, arXiv 2408.07978). The
target's draw does not depend on the draft, so the answers stay exact whatever the draft does.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad

from drafthead.core.sampling import RowRandom, arrival_times, kept_of_sorted
from drafthead.core.settings import LEAST_TOP_P


class NextDraws(NamedTuple):
    """A draft's knowledge of the target's next draws. Tensors alone, for recorded drafts."""

    keys: torch.Tensor  # [B, K] of the races, place d for the children of nodes of depth d
    settings: torch.Tensor  # [B, 4] of the draft's laws, see `SamplingConfig.settings`

    def padded(self, depths: int) -> "NextDraws":
        """These draws with keys for `depths` depths; those that are added are no races at all."""
        return self._replace(keys=pad(self.keys, (0, depths - self.keys.shape[1])))

    def at(self, depth: int) -> "NextDraws":
        """The draws for children of nodes of one depth alone, at place 0."""
        return self._replace(keys=self.keys[:, depth, None])

    def scores(
        self,
        depth: int,
        logits: torch.Tensor,  # [B, ..., k] from the largest on
        ids: torch.Tensor,  # as logits, their tokens
    ) -> torch.Tensor:
        """Float32 logarithms [B, ..., k] of the speed of each child of nodes of a depth.

        The largest is the draft's guess of the target's draw.
        """
        keys = self.keys[:, depth].view(-1, *[1] * (ids.dim() - 2))
        temperature, is_greedy = self.of_rows(logits.dim())
        scores = logits.float() / temperature
        # A greedy row needs more guesses than the one token that its draft would choose.
        kept = torch.where(is_greedy, scores, kept_of_sorted(scores, self.settings))
        return kept - arrival_times(keys, ids).log().masked_fill(is_greedy, 0)

    def of_rows(self, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's temperature, and whether it is greedy: [B, 1, ...], with `dims` dimensions."""
        by_row = self.settings.view(-1, *[1] * (dims - 1), 4)
        return by_row[..., 0], by_row[..., 2] < 2 * LEAST_TOP_P

    def best(
        self,
        depth: int,
        logits: torch.Tensor,  # as for `scores`
        ids: torch.Tensor,
        count: int,  # or all k, where there are fewer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` likeliest children of nodes of a depth: log-probabilities, and places in k.

        Both [B, ..., count], from the likeliest on. The probabilities are a guess: how likely the
        target's draw is each of them, the numbers being known. Of all softmax(scores / u), u = 1
        described the draws of the demo target best, given the demo draft model's probabilities.
        """
        chances = self.scores(depth, logits, ids).log_softmax(-1)
        return chances.topk(min(count, chances.shape[-1]), dim=-1)


# How a session chooses children: drawn independently of the target, guesses of the target's own
# draws, or simply the most probable.
Choice: TypeAlias = RowRandom | NextDraws | None
