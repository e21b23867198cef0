"""How the wall-clock time of an average step divides into phases."""

from dataclasses import dataclass

from drafthead.core.errors import UserError
from drafthead.infer.engine.stats import DecodeStats
from drafthead.lab.speedup_model import StepParts

STEP_PHASES = ("draft", "verify", "accept", "commit")
# Time of a step outside its phases: the planner, the loop itself, the caller that takes the tokens.
HOST = "host"


@dataclass(frozen=True)
class StepLedger:
    """The phases of an average step, and its yield.

    On a GPU kernels go on running after their phase has ended: their time then counts in the phase
    that waits for them, which is `accept`. The step as a whole is right on every device. A compiled
    step under `greedy` or `match` accepts within the graph of its pass, and small drafts are made
    there too: it is all `verify`.
    """

    seconds: dict[str, float]  # of a step, by phase; they add up to `step_seconds`
    step_seconds: float
    steps: int
    nodes: float  # scored by the target per row and step, on average
    tau: float
    tokens_per_second: float

    def parts(self, plain: "StepLedger") -> StepParts:
        """The step in steps of plain decoding."""
        host = self.seconds["accept"] + self.seconds["commit"] + self.seconds[HOST]
        draft, verify = self.seconds["draft"], self.seconds["verify"]
        return StepParts(*(part / plain.step_seconds for part in (draft, verify, host)))

    def bound(self, plain: "StepLedger") -> float:
        """tau over the step's phases in plain steps: the speedup, if nothing took time but them."""
        phases = sum(self.seconds[phase] for phase in STEP_PHASES)
        return self.tau * plain.step_seconds / phases


def ledger_of(stats: DecodeStats) -> StepLedger:
    """The ledger of an engine's statistics; raises UserError if they count no step."""
    if not stats.steps:
        raise UserError(
            "no answer goes beyond its first token, so there is no step to account for: allow more "
            "new tokens, or use other prompts"
        )
    step = stats.decode_seconds / stats.steps
    seconds = {phase: stats.seconds[phase] / stats.steps for phase in STEP_PHASES}
    seconds[HOST] = step - sum(seconds.values())
    return StepLedger(
        seconds, step, stats.steps, stats.nodes_per_step, stats.tau, stats.tokens_per_second
    )
