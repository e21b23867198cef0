"""The guesses of a block-parallel head after its pass: candidates, and the best tree of them.

The pass computes candidates for each depth; the probability of a candidate depends on the token
before it, so every child is scored by its real parent.
"""

from collections.abc import Callable
from typing import Any

import torch

from drafthead.core.coupling import NextDraws
from drafthead.core.sampling import DRAFT_SUPPORT, arrival_times, largest
from drafthead.heads.families.parallel.head import ParallelHead
from drafthead.heads.growing.dynamic import OURS, Growth, Operations, first_level, next_level
from drafthead.heads.growing.levels import Guess

CANDIDATES = 16  # tokens of each depth that a best-first tree chooses from

Part = Callable[..., Any]  # of a depth and the rest of its arguments


class DraftedBlock:
    """The outputs of one pass over a block, and the correction by the tokens chosen in it."""

    def __init__(
        self,
        head: ParallelHead,
        hidden: torch.Tensor,
        logits: torch.Tensor | None = None,
        largest: Callable[..., tuple[torch.Tensor, ...]] = largest,
    ):
        """`hidden` [B, K, D] and `logits` [B, K, Vd] are those of the slots; `largest` as
        `sampling.largest`.
        """
        self.correction, self.tokens_of = head.correction, head.tokens_of
        self.hidden, self.logits, self.largest = hidden, logits, largest

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] before the roots."""
        first = self.hidden[:, :1]
        return first[..., :0] if self.correction is None else self.correction.begin(first)

    def codes(
        self, depth: int, before: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The correction's codes [B, n, rank] of a slot (0 is the first) after tokens [B, n].

        Takes the states [B, n, R] before these tokens and also returns the states after them.
        """
        if self.correction is None:
            return state, state
        hidden = self.hidden[:, depth, None].expand(-1, before.shape[1], -1)
        return self.correction.advance(before, hidden, state)

    def logits_after(self, depth: int, codes: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, Vd] of a slot with the corrections of codes [B, n, rank]."""
        assert self.logits is not None
        logits = self.logits[:, depth, None]
        if self.correction is None:
            return logits.expand(-1, codes.shape[1], -1)
        return logits + self.correction.output(codes)

    def choose(
        self,
        depth: int,
        before: torch.Tensor,  # [B, n] candidates of the slot before, or the roots
        weights: torch.Tensor,  # [B, n, 1] their probabilities
        state: torch.Tensor,  # [B, 1, R] before these tokens, on average
        draws: NextDraws | None,  # of children of this depth, at place 0
    ) -> tuple[torch.Tensor, ...]:
        """The candidates of a slot: their places among the logits and tokens, both [B, k], and
        what the next slot needs in place of `weights` and `state`.
        """
        codes, states = self.codes(depth, before, state.expand(-1, before.shape[1], -1))
        code, state = ((weights * table).sum(dim=1, keepdim=True) for table in (codes, states))
        logits = self.logits_after(depth, code)[:, 0]
        most = CANDIDATES if draws is None else DRAFT_SUPPORT
        best, places, _ = self.largest(logits, most)
        if draws is not None:
            ids = self.tokens_of(places)
            best, order = draws.best(0, best, ids, min(CANDIDATES, ids.shape[-1]))
            places = places.gather(-1, order)
        weights = best.softmax(-1)[..., None].to(weights.dtype)
        return places, self.tokens_of(places), weights, state


class Scorer:
    """The few tokens of each depth that a tree chooses from, and their scores after any parent."""

    def __init__(
        self,
        block: DraftedBlock,
        candidates: torch.Tensor,  # [B, K, k] different tokens at each depth
        logits: torch.Tensor,  # [B, K, k] before the correction
        outputs: torch.Tensor | None,  # [B, K, rank, k]: codes times these are the correction
    ):
        self.block, self.candidates, self.logits, self.outputs = block, candidates, logits, outputs

    @classmethod
    def of(
        cls,
        block: DraftedBlock,
        roots: torch.Tensor,  # [B]
        draws: NextDraws | None = None,
        choose: Part | None = None,
    ) -> "Scorer":
        """Candidates after the roots; with `draws`, of the target's own draws.

        The correction of a slot depends on the token before it, which is not chosen yet. So the
        candidates are the best after the mean correction over the candidates of the slot before,
        weighted by their probabilities. `choose` takes the place of `DraftedBlock.choose`.
        """
        assert block.logits is not None
        before, state, choose = roots[:, None], block.begin(), choose or block.choose
        weights = torch.ones_like(before, dtype=block.hidden.dtype)[..., None]  # [B, n, 1]
        chosen = []
        for depth in range(block.logits.shape[1]):
            at = None if draws is None else draws.at(depth)
            places, before, weights, state = choose(depth, before, weights, state, at)
            chosen.append(places)
        guesses = torch.stack(chosen, dim=1)
        ids, base = block.tokens_of(guesses), block.logits.gather(-1, guesses)
        outputs: torch.Tensor | None = None
        if block.correction is not None:
            # In float32: a CPU multiplies small 16-bit matrices many times slower.
            outputs = block.correction.output.weight[guesses].float().mT
        if draws is not None:  # so that `log_probs` after any parent are those of `draws.best`
            temperature, is_greedy = draws.of_rows(3)
            times = arrival_times(draws.keys, ids).log().masked_fill(is_greedy, 0)
            base = base / temperature - times
            outputs = None if outputs is None else outputs / temperature[..., None]
        return cls(block, ids, base, outputs)

    def at(self, depth: int) -> list[Any]:
        """Of one depth the slot's hidden state [B, 1, D], and candidates, logits and outputs."""
        tables = self.block.hidden, self.candidates, self.logits, self.outputs
        return [None if table is None else table[:, depth, None] for table in tables]

    def begin(self) -> torch.Tensor:
        """The state [B, 1, R] before the roots."""
        return self.block.begin()

    def log_probs(
        self, depth: int, parents: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [B, F, k] of the candidates of a depth (0 is the first).

        They come after the tokens `parents` [B, F]. `state` [B, F, R] is the state before these
        tokens; the state after them, [B, F, R], is returned too.
        """
        codes, state = self.block.codes(depth, parents, state)
        logits = self.logits[:, depth, None].expand(-1, parents.shape[1], -1)
        if self.outputs is not None:
            logits = logits + codes.float() @ self.outputs[:, depth]
        return logits.log_softmax(-1), state


def scored(scorer: Scorer, depth: int, tokens: torch.Tensor, states: torch.Tensor) -> Guess:
    """All candidates of a depth after tokens [B, n], with states [B, n, R] before these."""
    log_probs, after = scorer.log_probs(depth, tokens, states)
    ids = scorer.candidates[:, depth, None].expand_as(log_probs)
    return Guess(after, log_probs, ids, log_probs.new_zeros(()))


def extended(
    scorer: Scorer,
    depth: int,
    growth: Growth,
    slots: torch.Tensor,  # [F], the numbers from 0, of the nodes to open
    operations: Operations = OURS,
) -> Growth:
    """The growth after one more level; which nodes see which is not kept: no pass follows."""
    width = scorer.candidates.shape[-1]
    grown = next_level(
        growth,
        slots,
        width,
        lambda nodes: scored(scorer, depth, nodes.tokens, nodes.states),
        operations=operations,
    )
    return grown._replace(visible=None)


def best_first_growth(
    roots: torch.Tensor,  # [B]
    scorer: Scorer,
    levels: int,
    frontier: int,
    extend: Part | None = None,
    operations: Operations = OURS,
) -> Growth:
    """The growth of trees after roots [B] to up to `levels` levels and `frontier` + 2 nodes.

    Trees grow level by level, for all rows at once and without waiting for the device.

    A path's score is the sum of its tokens' log-probabilities: what popping a heap of paths N times
    would give (DDTree, arXiv 2604.12989), with children scored by their real parent (DominoTree,
    arXiv 2607.08642). Of equal nodes the shallower goes first, then the one under the better
    parent, then the earlier candidate. With candidates x (log-probability -0.1) and y (-2.4) at two
    depths, after any parent, four nodes are the root, x (-0.1), y (-2.4) and x x (-0.2).

    Beside the root and a node of the next depth, a tree has room for `frontier` nodes of a depth:
    no others need children. More levels or a wider frontier than a tree needs change nothing in it.
    `extend` takes the place of `extended` by this scorer.
    """
    width = scorer.candidates.shape[-1]
    guess = scored(scorer, 0, roots[:, None], scorer.begin())
    growth = first_level(roots, guess, width, operations=operations)
    slots = torch.arange(frontier, device=roots.device)
    for depth in range(1, levels):
        some = slots[: growth.opened.shape[1] * width]
        growth = (
            extended(scorer, depth, growth, some) if extend is None else extend(depth, growth, some)
        )
    return growth


def num_candidates(width: int, levels: int, frontier: int) -> int:
    """Nodes, with the root, that such a growth can choose from: `width` children of a node each.

    With 16 children, 2 levels and 6 nodes that get children, 1 + 16 + 96.
    """
    total, opened = 1, 1
    for _ in range(levels):
        children = opened * width
        total, opened = total + children, min(frontier, children)
    return total
