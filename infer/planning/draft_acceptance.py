"""Acceptance, learnt while decoding, of drafts that cost passes and of free ones."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafthead.core.trees.guesses import GuessTree
from drafthead.core.trees.tree import Budget, Free

Size = Budget | None  # None: a step without a draft
Table = NDArray[np.float64]

MEMORY = 128  # drafted steps after which an observation keeps 1/e of its weight: long enough to
# average out luck, short enough to follow a change of subject
PRIOR_STEPS = 32  # as which the acceptance measured in training counts, so that the first few steps
# do not decide alone
LEAST_LIKELY, MOST_CERTAIN = 1e-6, 0.98  # shares beyond these say no more of other sizes
BINS = 16  # equal parts of [0, 1] in which guesses are judged apart
FIRST_WEIGHT = 16.0  # guesses as which the first belief counts, in each bin: that guesses are true


class DraftAcceptance:
    """The depths that drafts of each size have, and those to which they are accepted.

    A draft that may stop early brings a token of depth 3 if it goes that far and is right that far.
    The two are learnt apart: what was not drafted was not refused. Old steps fade exponentially.

    Sizes that differ in nothing but the most levels of a draft, such as 4, 7 and 10 nodes of 1, 2
    and 3 levels, make a ladder: where a draft of at most two levels stops, one of three stops too.
    """

    def __init__(self, sizes: Sequence[Size]):
        """For S sizes, by the chances of each before decoding; D is the greatest depth."""
        self.places = {size: place for place, size in enumerate(sizes)}
        drafts = [size for size in sizes if size is not None]
        depths = max(len(size.chances) for size in drafts)
        self.chances = np.zeros((len(sizes), depths))  # [S, D]
        for size in drafts:
            self.chances[self.places[size], : len(size.chances)] = size.chances
        levels = [size for size in drafts if not isinstance(size, Free)]
        grows = all((size.nodes - 1) % size.depth == 0 for size in levels)
        # Drafters that grow level by level guess chains and trees by other means.
        self.kinds = np.array([int(grows and is_tree(size)) for size in sizes])  # [S]
        self.drafted = np.zeros((2, depths))  # by kind: drafts that might have reached each depth
        self.expected = self.drafted.copy()  # how many were to
        deepest = {self.kinds[self.places[size]]: size for size in sorted(drafts, key=by_depth)}
        for kind, size in deepest.items():
            self.drafted[kind, : len(size.chances)] = PRIOR_STEPS
            self.expected[kind, : len(size.chances)] = PRIOR_STEPS * np.array(size.chances)
        self.observed = self.expected.copy()  # how many did
        by_slope: dict[int, list[Size]] = {}
        for size in sorted(levels) if grows else ():
            by_slope.setdefault((size.nodes - 1) // size.depth, []).append(size)
        self.ladders = [ladder for ladder in by_slope.values() if len(ladder) > 1]
        # Of each ladder: drafts that might have had each level, and those that had it.
        self.tried = [np.full(len(ladder), float(PRIOR_STEPS)) for ladder in self.ladders]
        self.had = [tried.copy() for tried in self.tried]

    def stops(self, size: Size) -> list[Size]:
        """The sizes at which a draft within `size` may end, from one level to itself."""
        for ladder in self.ladders:
            if size in ladder:
                return ladder[: ladder.index(size) + 1]
        return [size]

    def tokens(self) -> Table:
        """Tokens that a step of each size commits, the bonus included [S]."""
        return np.asarray(1 + self.reached().sum(-1))

    def reached(self) -> Table:
        """The share of steps of each size that are accepted to depth 1, 2, ... [S, D].

        Each chance is raised to the power log(observed) / log(expected) of the shares so far. Where
        10 drafts of 20 were expected to be accepted and 5 were, 0.5 becomes 0.25 and 0.8 becomes
        0.64: on a text that is harder than those of the training, small trees lose more than large
        ones, because what the draft holds likely is more often wrong, and lower guesses right.
        """
        counts = np.where(self.drafted > 0, self.drafted, 1)
        powers = log_share(self.observed / counts) / log_share(self.expected / counts)
        drafted = np.ones_like(self.chances)
        for number, ladder in enumerate(self.ladders):
            # What is deeper than a size has levels is there where the last one is.
            last = np.minimum(np.arange(drafted.shape[1]), np.arange(len(ladder))[:, None])
            drafted[[self.places[size] for size in ladder]] = self._going(number)[last]
        chances = np.minimum(self.chances, MOST_CERTAIN) ** powers[self.kinds]
        # No depth is reached more often than the one before it.
        found = np.where(self.chances > 0, chances, 0) * drafted
        return np.minimum.accumulate(found, axis=-1)

    def seconds(self, seconds: Table) -> Table:
        """The mean seconds of a step of each size [S], by the seconds [S] of whole drafts.

        If drafts of 1, 2 and 3 levels take 1.2, 1.3 and 1.4 seconds, and half of them go on after
        the first level and all after the second, the three sizes take 1.2, 1.25 and 1.3.
        """
        found = seconds.copy()
        for number, ladder in enumerate(self.ladders):
            places = [self.places[size] for size in ladder]
            of_each_level = np.diff(seconds[places], prepend=0)
            found[places] = np.cumsum(self._going(number) * of_each_level)
        return found

    def _going(self, ladder: int) -> Table:
        """The probability that a draft has level 1, 2, ..., if it may have them all."""
        return np.asarray(np.cumprod(self.had[ladder] / self.tried[ladder]))

    def add(self, size: Size, made: Size, accept_lengths: Sequence[int]) -> None:
        """Record a step: the size of its draft, the stop at which that ended, tokens by row.

        An accept length counts the root, so 3 means that depths 1 and 2 were reached. A draft that
        was limited to two levels shows nothing of the third.
        """
        keep, stops = 1 - 1 / MEMORY, self.stops(size)
        for number, ladder in enumerate(self.ladders):
            if size in ladder:
                levels = stops.index(made) + 1
                # One level more than it had was tried too, and refused by the draft itself.
                for level in range(1, min(levels + 1, len(stops))):
                    self.tried[number][level] = keep * self.tried[number][level] + 1
                    self.had[number][level] = keep * self.had[number][level] + (level < levels)
        chances, kind = self.chances[self.places[made]], self.kinds[self.places[made]]
        depths = 0 if made is None else len(made.chances)
        reached = share_that_reached(accept_lengths, depths)
        self.drafted[kind, :depths] = keep * self.drafted[kind, :depths] + 1
        self.expected[kind, :depths] = keep * self.expected[kind, :depths] + chances[:depths]
        self.observed[kind, :depths] = keep * self.observed[kind, :depths] + reached

    def age(self) -> None:
        """Halve the weight of all acceptance observed so far."""
        for sums in (self.drafted, self.expected, self.observed):
            sums /= 2


def log_share(shares: Table) -> Table:
    """Logarithms of shares [...] in [0, 1], none of them 0 or infinite."""
    return np.asarray(np.log(np.clip(shares, LEAST_LIKELY, MOST_CERTAIN)))


def by_depth(size: Budget) -> tuple[int, int]:
    """Sorts sizes by depth; of those that are equally deep the smallest is the last."""
    return len(size.chances), -size.nodes


def is_tree(size: Size) -> bool:
    """Whether a draft of a size has more than one node a level."""
    return size is not None and size.nodes > size.levels + 1


def share_that_reached(accept_lengths: Sequence[int], depths: int) -> Table:
    """The share of rows that were accepted to depth 1, 2, ... [depths]."""
    lengths = np.array(accept_lengths or [1])
    return np.asarray((lengths > np.arange(1, depths + 1)[:, None]).mean(1))


class Calibration:
    """The share of guesses that came true, by their size, in 16 bins.

    Where guesses of about 0.6 add up to 10 and 5 of them came true, 0.6 becomes 0.3. Several
    threads may teach it; if one addition overwrites another, little is lost.
    """

    def __init__(self) -> None:
        self.guessed = [FIRST_WEIGHT * (place + 0.5) / BINS for place in range(BINS)]  # sums
        self.accepted = list(self.guessed)

    def __call__(self, guess: float) -> float:
        """The probability that a guess in [0, 1] comes true."""
        place = bin_of(guess)
        return min(1.0, guess * self.accepted[place] / self.guessed[place])

    def add(self, guess: float, came_true: bool) -> None:
        """Record a guess."""
        place, keep = bin_of(guess), 1 - 1 / MEMORY
        self.guessed[place] = keep * self.guessed[place] + guess
        self.accepted[place] = keep * self.accepted[place] + came_true

    def add_depths(self, guesses: Sequence[float], length: int) -> None:
        """Record the tokens that a step committed, by guesses that each depth is reached after the
        one before.
        """
        for depth, guess in enumerate(guesses[:length], start=1):
            self.add(guess, depth < length)


class Weighed:
    """The best nodes of a free tree, ever more of them: how likely each depth is reached.

    A true text follows one path at most, so what the nodes of a depth promise adds up. A curve
    judges each depth if the one before it was reached: after guesses 0.6 and 0.3, that a second
    token is right in half of the cases. So what comes true deep down, after all tokens before, says
    nothing of first tokens that promise as little.
    """

    def __init__(self, tree: GuessTree, curve: Calibration, nodes: int = 0):
        """The best `nodes` nodes."""
        self.tree, self.curve, self.order = tree, curve, tree.order()
        self.nodes = 0
        self.hoped: list[float] = []  # of depth 1, 2, ..., by the scores
        self.guesses: list[float] = []  # the same, where the depth before is reached
        self.found: list[float] = []  # by what such guesses came true at
        self.grow(nodes)

    def grow(self, nodes: int) -> None:
        """Take more nodes, until there are so many or no more."""
        depths, scores, hoped = self.tree.depths, self.tree.scores, self.hoped
        first = len(hoped)  # place of the first depth that changes
        for node in self.order[self.nodes : nodes]:
            place = depths[node] - 1
            if place == len(hoped):  # its parent was there before
                hoped.append(0.0)
            hoped[place] += math.exp(scores[node])
            first = min(first, place)
        self.nodes = max(self.nodes, nodes)
        # Depths above the first that changed keep what was found for them.
        del self.guesses[first:], self.found[first:]
        before, product = (hoped[first - 1], self.found[-1]) if first else (1.0, 1.0)
        for chance in hoped[first:]:
            guess = min(1.0, chance / before) if before > 0 else 0.0
            product *= self.curve(guess)
            self.guesses.append(guess)
            self.found.append(product)
            before = chance


def bin_of(guess: float) -> int:
    """The bin that a guess in [0, 1] lies in."""
    return min(int(guess * BINS), BINS - 1)
