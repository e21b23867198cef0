"""The decoder that tests of exactness compare with: the target alone, by other code."""

from drafthead.heads.drafting.drafter import Drafter
from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.plain import PlainStepper
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.verifiers import Verifier


class OracleDecoder(Decoder):
    """Plain decoding without trees, verifiers and graphs; takes the options of `Decoder`."""

    def _stepper(self, run: BatchRun, drafter: Drafter, rule: Verifier) -> Stepper:
        """One token a pass, whatever the target."""
        return PlainStepper(self.target, run, drafter.features, rule)
