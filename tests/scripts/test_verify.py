"""`verify` on every head family: low temperatures, top-p and a repetition penalty."""

import pytest
import torch

from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness import exactness as gathered
from drafthead.lab.exactness.exactness import SampledPair
from drafthead.lab.reports.exactness import evidence_report

LOSSLESS = sorted(v.name for v in VERIFIERS.values() if v.lossless and not v.greedy)
# Everywhere in the distribution, so that some of them have near-ties at low temperatures.
PROMPTS = [[9, 10, 11], [12, 13], [3, 5, 8, 1], [14], [2, 2, 6], [15, 0, 4]]
EFFORT = gathered.Effort(samples=640, answers=48, max_new_tokens=32, false_alarm=1e-4)


@pytest.fixture(scope="module")
def flat(make_target) -> Target:
    """A target of 16 tokens whose laws leave a choice at temperatures down to 0.05."""
    target = make_target(seed=3, vocab=16)
    with torch.no_grad():
        target.model.lm_head.weight *= 0.15
    return target


@pytest.mark.slow
@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.05])
def test_every_family_is_exact(flat, make_drafter, family, temperature, rule, monkeypatch) -> None:
    """`pytest -s` prints the table of each, with its power."""
    monkeypatch.setattr(gathered, "BATCHES", 1)  # the tables know no family
    decoder = Decoder(flat, make_drafter(f"{family}:tree", flat))
    sampling = SamplingConfig(temperature, top_p=0.9)
    pair = SampledPair(decoder, flat, sampling, rule, repetition_penalty=1.2)
    evidence = gathered.evidence_of(pair, PROMPTS, EFFORT, seed=0)
    about = {"verifier": f"{rule}, {family}, T = {temperature}", "prompts": len(PROMPTS)}
    evidence_report(evidence, sampling, about).show()
    assert evidence.failures() == []
    assert evidence.later is not None and evidence.later.accepted > 0.02
