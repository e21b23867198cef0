"""The decoder that tests of exactness compare with: the target alone, by other code."""

from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.method import Method
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.request.decode_options import DecodeSettings
from drafthead.lab.exactness.plain import PlainStepper


class OracleDecoder(Decoder):
    """Plain decoding without trees, verifiers and graphs; takes the options of `Decoder`."""

    def method(self, run: BatchRun, settings: DecodeSettings) -> Method:
        """As for any decoder, with other steps."""
        made = super().method(run, settings)
        return PlainMethod(made.target, made.drafter, made.rule, made.planner, made.most_nodes)


class PlainMethod(Method):
    """One token a pass, whatever the target."""

    def stepper(self, run: BatchRun) -> Stepper:
        """What makes a batch's steps."""
        return PlainStepper(self.target, run, self.drafter.features, self.rule)
