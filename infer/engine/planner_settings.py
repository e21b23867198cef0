"""The constants of the adaptive planner, with their units and the reason for each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerSettings:
    """How often an `AdaptivePlan` decides, how much it demands, and how long it remembers."""

    # Steps of the batch from one choice to the next: choosing costs time, so not at every step.
    steps_per_choice: int = 4
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

    # While plain decoding is best, plain steps before the first probe. Every further spell is twice
    # as long, up to `longest_wait`: a drafter that stays bad must cost almost nothing.
    first_probe: int = 96
    # Drafted steps of a probe, which shows whether acceptance has improved.
    probe_steps: int = 4
    # While drafts are best, drafted steps before the first glance at plain steps. Every further
    # wait is twice as long, up to `longest_wait`. The first comes early: the timing before decoding
    # may have hit a bad moment.
    first_glance: int = 16
    # Plain steps of a glance: `settling_steps` that do not count, and a few that do.
    glance_steps: int = 6
    # Upper limit, in steps, of the waits before probes and glances.
    longest_wait: int = 384

    # Steps after a change of kind (plain or drafted) that are not compared: they find the CPU
    # caches full of the other kind's data.
    settling_steps: int = 2
    # Steps on either side of a change of kind that are compared; few, as load changes quickly.
    compared_steps: int = 16
    # Latest changes of kind whose comparisons are averaged.
    compared_changes: int = 8
    # Changes as which the timing before decoding counts.
    prior_changes: int = 4


DEFAULT_SETTINGS = PlannerSettings()
