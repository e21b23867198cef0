"""The oracle shares no step with the engine, or it could not find the engine's errors."""

from tiny import random_prompts

from drafthead.core.target.target import Target
from drafthead.infer.engine.stepper import Stepper
from drafthead.lab.exactness.oracle import OracleDecoder


def test_the_oracle_decodes_without_the_engines_steps(target: Target, monkeypatch) -> None:
    monkeypatch.delattr(Stepper, "launch")
    [answer] = OracleDecoder(target).generate(random_prompts(1), max_new_tokens=4).sequences
    assert len(answer) == 4
