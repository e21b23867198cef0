"""The time of plain steps against drafted ones while decoding, corrected for other load."""

from statistics import mean, median

from drafthead.infer.engine.planner_settings import DEFAULT_SETTINGS, PlannerSettings


class PaceTracker:
    """How plain and drafted steps compare now, relative to the timing before decoding.

    Background load changes by the second. It slows multi-token passes (compute-bound) more than
    single-token passes (memory-bound). So steps are compared right before and right after a change
    from one kind to the other.
    """

    def __init__(self, settings: PlannerSettings = DEFAULT_SETTINGS) -> None:
        self.settings = settings
        self.changes = [1.0] * settings.prior_changes  # plain over drafted, at each change of kind
        self.drafting = False  # the kind of the last step
        # Measured over timed seconds, of the steps of the other kind before the last change.
        self.before: list[float] = []
        self.after: list[float] = []  # the same of the steps since that change
        self.steps = 0  # since the last change, those that do not count included

    def add(self, drafted: bool, ratio: float) -> None:
        """Record a step that took `ratio` times as long as was timed."""
        if drafted != self.drafting:
            self.changes = self._with_last_change()
            self.before = self.after[-self.settings.compared_steps :]
            self.after, self.steps, self.drafting = [], 0, drafted
        self.steps += 1
        if self.steps > self.settings.settling_steps:
            self.after.append(ratio)

    @property
    def plain_over_drafted(self) -> float:
        """How much more plain steps have slowed down since they were timed than drafted ones.

        Drafted steps at 1.2, 1.3 and 1.2 of what was timed and then plain ones at 0.9 and 0.9 make
        0.75; with the four prior changes, which are 1, the mean is 0.95.
        """
        return mean(self._with_last_change())

    def _with_last_change(self) -> list[float]:
        """The latest comparisons, including what is known about the last change."""
        changes = self.changes
        if self.before and self.after:
            change = median(self.after[: self.settings.compared_steps]) / median(self.before)
            changes = [*changes, 1 / change if self.drafting else change]
        return changes[-self.settings.compared_changes :]
