"""Costs of steps of each size, as a belief that real steps correct.

The belief is a normal distribution over the logarithms of the seconds of all sizes at once. Sizes
vary together: all of them when the machine becomes slower, large trees more than small ones when
nodes become dear. So every step teaches something about every size, and a step that follows others
on a machine that has just slowed down does not look dear. This is a Kalman filter.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from threading import RLock

import numpy as np
import torch

from drafthead.core.trees.tree import Budget, Free
from drafthead.infer.planning.draft_acceptance import Size, Table

# The guess for a machine that nobody has seen: a step with a draft takes DRAFT plain steps more
# than a plain one, NODE for each node after the root and LEVEL for each level. On the cautious
# side: with it a good head begins with trees of about 4 nodes.
DRAFT, NODE, LEVEL = 0.05, 0.05, 0.05
# NODE on a GPU, for each row: as long as it waits for weights, computing is nearly free. On an H100
# 0.1 to 0.2 % (benchmarks/gpu); others compute less in that time.
NODE_ON_GPU = 0.003
# Deviations of the guess, of the logarithm of a step's seconds (0.05 is about 5 %): of all steps
# alike, of all drafts alike, for each doubling of nodes, for each level, and of each size alone.
ALL_DEVIATION, DRAFT_DEVIATION, DOUBLING_DEVIATION = 1.0, 0.15, 0.25
LEVEL_DEVIATION, SIZE_DEVIATION = 0.1, 0.05
# Of the median of a run's steps, apart from what changes the whole machine.
RUN_DEVIATION = 0.05
# Share of what is known about a size that is left after each further run.
MEMORY = 0.998
# Share of what makes a size look dearer than guessed that is left after each further run: a size
# five times as dear is tried again after about 800 steps, and one that is sixteen times as dear for
# good costs 3 % in all.
DEAR_MEMORY = 0.999
# Either share when another process or batch size goes on from there.
INHERITED = 0.75
# Deviation of the machine's speed from one run to the next: at first, least and greatest; and the
# runs over which it is averaged.
FIRST_DRIFT, LEAST_DRIFT, MOST_DRIFT, DRIFT_MEMORY = 0.1, 0.02, 0.3, 16
# Deviations beyond which a surprise counts no more: single steps may take ten times as long.
MOST_SURPRISE = 3.0


class StepCosts:
    """The belief about one kind of steps: what a step of each size takes on this machine.

    Information fades with every run of steps, so costs of a bad minute are forgotten. Several
    threads may decode with one belief; whoever reads or changes it holds `lock`.
    """

    def __init__(self, budgets: Sequence[Budget], node: float = NODE):
        """The guess for sizes that nobody has seen; there are S = 1 + len(budgets) of them.

        `node` is what each node is guessed to cost, in plain steps.
        """
        self.sizes: list[Size] = [None, *sorted(budgets)]  # from small to large
        self.places = {size: place for place, size in enumerate(self.sizes)}
        self.guess = guessed_covariance(self.sizes)  # [S, S]
        self.fading = (1 - MEMORY) * self.guess
        self.covariance = self.guess  # [S, S]
        # Of the logarithms of seconds.
        self.guessed: Table = np.log([guessed_ratio(s, node) for s in self.sizes])  # [S]
        self.mean = self.guessed
        self.drift = FIRST_DRIFT**2  # variance of the machine's speed from run to run
        self.speed_known = False  # else `mean` is known up to a common term only
        self.is_guess = True  # nothing is known about any size
        self.was_timed = False  # sizes were timed on purpose, and not only met while decoding
        self.lock = RLock()

    @property
    def log_seconds(self) -> Table:
        """Logarithms of the seconds of a step of each size [S], none quicker than a plain step."""
        return np.maximum(self.mean, self.mean[0])

    def seconds(self, size: Size) -> float:
        """Of one step, as far as known."""
        return math.exp(self.log_seconds[self.places[size]])

    def add(self, size: Size, seconds: Sequence[float], continued: bool) -> None:
        """Learn from a run of steps of one size; `continued` if the run before was of that size."""
        place = self.places[size]
        # Of two steps the quicker one: what else the machine does only makes steps longer.
        took = math.log(max(median_low(seconds), 1e-9))
        # The first run of a process forgets more: what was kept is of another hour.
        self._fade(DEAR_MEMORY if self.speed_known else INHERITED)
        if not self.speed_known:
            # Ratios were inherited or guessed, so one run gives the seconds of all sizes.
            self.mean = self.mean + (took - self.mean[place])
        surprise, noise = took - self.mean[place], RUN_DEVIATION**2
        # After another size the surprise would also be that of the ratio.
        if continued:
            seen = min(max(surprise**2 - noise, LEAST_DRIFT**2), MOST_DRIFT**2)
            self.drift += (seen - self.drift) / DRIFT_MEMORY
        # The longer ago, the less is known: at last no more than at first.
        kept = MEMORY * self.covariance + (self.fading + self.drift)
        variance = kept[place, place] + noise
        most = MOST_SURPRISE * math.sqrt(variance)
        # Kalman's gain for all sizes at once: what varies with this one follows it.
        gain = kept[place] / variance
        self.mean = self.mean + gain * min(max(surprise, -most), most)
        self.covariance = kept - np.outer(gain, kept[place])
        self.speed_known, self.is_guess = True, False

    def _fade(self, share: float) -> None:
        """Leave a share of what makes sizes dearer than guessed, beside plain steps.

        A size that looks too cheap is chosen and found out. One that looks too dear is not met
        again, and a busy hour makes sizes look dear: so that is forgotten where nothing confirms
        it. Where the guess is twice a plain step, and 8 times were seen, a share of 0.5 leaves 4.
        """
        as_guessed = self.guessed + (self.mean[0] - self.guessed[0])
        self.mean = self.mean - (1 - share) * np.maximum(self.mean - as_guessed, 0)

    def deviations_from(self, size: Size) -> Table:
        """Deviations [S] of the ratio of each size's seconds to those of `size`."""
        place = self.places[size]
        variances = np.diag(self.covariance) + self.covariance[place, place]
        return np.sqrt(np.maximum(variances - 2 * self.covariance[place], 0))

    def lessons(self, size: Size) -> Table:
        """Deviations [S] by which a run of each size would move its ratio to `size`.

        Nothing is learnt from a size that was just seen, even if little is known of the other one.
        """
        variances = np.diag(self.covariance) + RUN_DEVIATION**2
        shared = np.diag(self.covariance) - self.covariance[self.places[size]]
        return np.abs(shared) / np.sqrt(variances)

    def set_timed(self, seconds: Mapping[Size, float]) -> None:
        """Believe what sizes were timed at, plain steps among them.

        Of the others, what the guess makes of these: where 8 nodes are twice as dear as guessed, so
        are 64 nodes.
        """
        timed = [self.places[size] for size in seconds]
        plain = math.log(seconds[None])
        surprise = np.log(list(seconds.values())) - plain - self.guessed[timed]
        gain = np.linalg.solve(self.guess[np.ix_(timed, timed)], self.guess[timed]).T
        self.mean = plain + self.guessed + gain @ surprise
        untimed = self.guess - gain @ self.guess[timed]  # 0 for what was timed
        # The machine may have another speed when decoding begins.
        known = SIZE_DEVIATION**2 * np.eye(len(self.sizes))
        self.covariance = untimed + known + ALL_DEVIATION**2
        self.speed_known = self.was_timed = True
        self.is_guess = False

    def go_on_from(self, mean: Table, covariance: Table) -> None:
        """Begin with a mean [S] with covariance [S, S] about similar steps, or older ones."""
        share = INHERITED
        self.mean = mean
        self.covariance = share * covariance + (1 - share) * self.guess
        self.speed_known = self.is_guess = False


def guessed_ratio(size: Size, node: float) -> float:
    """Seconds of a step over those of a plain one, for a machine that nobody has seen."""
    if size is None:
        return 1.0
    return 1 + DRAFT + node * (size.nodes - 1) + LEVEL * size.levels


def guessed_node(device: torch.device, rows: int) -> float:
    """The guessed cost of each node of so many rows on a device, in plain steps."""
    return NODE if device.type == "cpu" else min(NODE, NODE_ON_GPU * rows)


def guessed_covariance(sizes: Sequence[Size]) -> Table:
    """The covariance [S, S] of log seconds: how far the guess may be off, and how far alike.

    It grows with the nodes as a random walk does: 8 and 16 nodes share what makes 8 dear, and each
    doubling adds something of its own. Likewise for levels.
    """
    drafts = np.array([size is not None for size in sizes], float)
    are_free = np.array([isinstance(size, Free) for size in sizes])
    same = np.equal.outer(are_free, are_free).astype(float)  # those that cost passes cost alike
    doublings = np.log2([size.nodes if size else 1 for size in sizes])
    levels = np.array([size.levels if size else 0 for size in sizes], float)
    return np.asarray(
        ALL_DEVIATION**2
        + DRAFT_DEVIATION**2 * np.outer(drafts, drafts) * same
        + DOUBLING_DEVIATION**2 * np.minimum.outer(doublings, doublings)
        + LEVEL_DEVIATION**2 * np.minimum.outer(levels, levels)
        + SIZE_DEVIATION**2 * np.eye(len(sizes))
    )
