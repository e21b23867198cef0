"""Which of a target's layers draft best for it: exits, and layers left out one after the other.

Draft & Verify (Zhang et al., 2023, arXiv 2309.08168) searches sets of layers by Bayesian
optimisation of the measured speed. Here the search is greedy: of all sets with one layer less, the
one that guesses best goes on. It chooses by some answers and reports what others show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafthead.heads.target.part import part_of
from drafthead.heads.target.target import Target
from drafthead.lab.own_layers.layer_acceptance import GuessedAnswers, alpha_of
from drafthead.lab.profiling.bandwidth import weight_bytes
from drafthead.lab.speedup_model import MAX_CHAIN, chain_speedup


@dataclass(frozen=True)
class LayerSet:
    """Layers that could draft, and what they promise."""

    layers: tuple[int, ...]
    alpha: float  # share of first guesses that are the target's token
    c: float  # weights that a pass of them reads / those of a whole pass
    chain: int  # the best number of drafted tokens, at least 1
    speedup: float  # of greedy decoding with it, over plain decoding


class LayerSearch:
    """A target and the answers by which sets of its layers are compared."""

    def __init__(
        self,
        target: Target,
        choosing: Sequence[GuessedAnswers],
        reporting: Sequence[GuessedAnswers],
    ):
        """Sets are chosen by some answers, and `LayerSet` says what others show."""
        self.target, self.choosing, self.reporting = target, choosing, reporting
        self.bounds: dict[int, float] = {}  # alpha when the layer was left out the last time

    def promise(self, layers: Sequence[int]) -> LayerSet:
        """What a set of layers promises; raises UserError where `part_of` does.

        The model is Leviathan et al.'s (`chain_speedup`), where a pass takes as long as reading its
        weights.
        """
        part = part_of(self.target, layers)
        alpha = alpha_of(part, self.reporting)
        c = weight_bytes(part, 1) / weight_bytes(self.target, 1)
        best = max(range(1, MAX_CHAIN + 1), key=lambda length: chain_speedup(alpha, length, c))
        return LayerSet(tuple(layers), alpha, c, best, chain_speedup(alpha, best, c))

    def with_one_less(
        self, layers: Sequence[int], goes_on: Callable[[], bool]
    ) -> tuple[int, ...] | None:
        """The set with one layer less that guesses best.

        `goes_on` is asked before each set; None where it ends the search. A layer is mostly missed
        more once others are missing too: what leaving it out gave before is taken for a bound of
        what it gives now, and so most sets need not be tried (Minoux, 1978, accelerated greedy).
        The first call tries all.
        """
        best: tuple[float, tuple[int, ...]] = (-1.0, ())
        for layer in sorted(layers, key=lambda layer: -self.bounds.get(layer, 1.0)):
            if self.bounds.get(layer, 1.0) <= best[0]:
                break
            if not goes_on():
                return None
            less = tuple(other for other in layers if other != layer)
            self.bounds[layer] = alpha_of(part_of(self.target, less), self.choosing)
            best = max(best, (self.bounds[layer], less), key=lambda found: found[0])
        return best[1]
