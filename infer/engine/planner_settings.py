"""The constants of the adaptive planner, with their units and the reason for each."""

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class PlannerSettings:
    """How often an `AdaptivePlan` decides, what it demands and tries, and how long it remembers."""

    # Steps of a run: all of one size, then the plan chooses again. Choosing costs time, so not at
    # every step.
    run_steps: int = 4
    # Steps at the beginning of a run of another size than the last that are not timed: they find
    # the CPU caches full of the other size's data, and may compile a graph.
    settling_steps: int = 2
    # Ratio of tokens per second that a larger tree must promise over a smaller one, and any tree
    # over plain decoding. The best of many estimates is seldom as good as it looks, and wide passes
    # suffer most when the machine becomes busy.
    required_gain: float = 1.03

    # Drafted steps after which an observation of acceptance keeps 1/e of its weight: long enough to
    # average out luck, short enough to follow a change of subject.
    acceptance_memory: int = 128
    # Drafted steps as which the acceptance measured in training counts, so that the first few steps
    # do not decide alone.
    prior_steps: int = 32

    # Share of all time that drafts may lose against plain decoding, and likewise trials against the
    # best size.
    loss_share: float = 0.01
    # The same in plain steps: at first, and the most that is saved up. An always wrong drafter
    # loses no more than 8 + 5 of the first 512 steps, or 3 %; a good one does not run out of it by
    # chance.
    first_loss: float = 8.0
    most_for_drafts: float = 24.0
    most_for_trials: float = 9.0
    # A trial counts as losing at least this share of its time, whatever it brought: changing the
    # size costs a little that is not timed.
    least_loss: float = 0.1
    # Standard deviations by which a size may be cheaper than believed when a trial is considered,
    # and dearer when it must be paid for.
    optimism: float = 1.0
    caution: float = 2.0

    def for_rows(self, rows: int) -> Self:
        """The settings for a batch: a step that is lost is lost in every row.

        So less may be lost at first: a quarter of the steps, which are four times the tokens, with
        16 rows. Answers of a batch often end before the accounts would have filled again.
        """
        return replace(self, first_loss=self.first_loss / math.sqrt(rows))


@dataclass(frozen=True)
class CostSettings:
    """What `StepCosts` believes of a machine before it has seen any step, and how it learns.

    Deviations are those of the logarithm of a step's seconds: 0.05 is about 5 %.
    """

    # The guess: a step with a draft takes `draft` plain steps more than a plain one, `node` for
    # each node after the root and `level` for each level. On the cautious side: with it a good
    # head begins with trees of about 4 nodes.
    draft: float = 0.05
    node: float = 0.05
    level: float = 0.05

    # Deviations of the guess: of all steps alike, of all drafts alike, for each doubling of the
    # nodes, for each level, and of each size alone.
    all_deviation: float = 1.0
    draft_deviation: float = 0.15
    doubling_deviation: float = 0.25
    level_deviation: float = 0.1
    size_deviation: float = 0.05

    # Deviation of the median of a run's steps, apart from what changes the whole machine.
    run_deviation: float = 0.05
    # Share of what is known about a size that is left after each further run.
    memory: float = 0.998
    # Share of what makes a size look dearer than guessed that is left after each further run: a
    # size five times as dear is tried again after about 800 steps, and one that is sixteen times
    # as dear for good costs 3 % in all.
    dear_memory: float = 0.999
    # Either share when another process or batch size goes on from there.
    inherited: float = 0.75
    # Deviation of the machine's speed from one run to the next: at first, least and greatest.
    first_drift: float = 0.1
    least_drift: float = 0.02
    most_drift: float = 0.3
    # Runs over which that is averaged.
    drift_memory: int = 16
    # Deviations beyond which a surprise counts no more: single steps may take ten times as long.
    most_surprise: float = 3.0


DEFAULT_SETTINGS = PlannerSettings()
DEFAULT_COSTS = CostSettings()
