"""Rows of one batch are drafted for by what each of them wants, and share their passes."""

from dataclasses import replace

import pytest
from rehearsal import rehearse
from tiny import random_prompts

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.heads.families.parallel.drafter import ParallelSession
from drafthead.infer import Decoder
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.request.options import read_options
from drafthead.infer.scheduling.tickets import Ticket
from drafthead.infer.timing.plans import Plans

NAMES = [
    "eagle3:own", "draft-model", "parallel:own+lookup", "parallel:own+store",
    *(pytest.param(name, marks=pytest.mark.thorough)
      for name in ("prompt-lookup", "medusa:tree+lookup", "by-text", "own-layers", "hydra:own")),
]  # fmt: skip
LENGTH = 24
LAWS = [
    {"max_new_tokens": LENGTH},
    {"max_new_tokens": LENGTH, "temperature": 0.8, "seed": 3, "verifier": "match"},
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["eager", "recorded"])
def test_rows_with_and_without_drafts_share_passes(
    name, way, target, make_drafter, monkeypatch
) -> None:
    """All get the text of plain decoding, and a row is told of its own drafts alone."""
    drafter = make_drafter(name, target)
    if way == "recorded":
        rehearse(monkeypatch)
    decoder = Decoder(target if way == "eager" else RecordedTarget(target), drafter)
    wants = [None, frozenset(), *(frozenset([each]) for each in drafter.names)]
    rows, plain = decoder.running_rows(16), Decoder(target)
    prompts = random_prompts(2 * len(wants))
    rows.admit([
        Ticket(n, replace(decoder.request(prompt, read_options(LAWS[n % 2])), drafts=wants[n // 2]))
        for n, prompt in enumerate(prompts)
    ])  # fmt: skip
    found, drafted, batches = [[] for _ in prompts], [0] * len(prompts), []
    while rows.count:
        for gain in rows.step():
            found[gain.ticket.id] += gain.tokens
            drafted[gain.ticket.id] += gain.proposed
            assert gain.accepted <= gain.proposed
        batches.append(len(rows.batches))
    for number, prompt in enumerate(prompts):
        assert found[number] == plain.generate(prompt, **LAWS[number % 2]).sequences[0]
    assert batches[-2] == 1, "one batch for all of them"
    assert drafted[2] == drafted[3] == 0 and min(drafted[:2]) > 0


def test_rows_with_drafts_of_their_own_follow_the_target(target, make_drafter) -> None:
    """Else a draft model's own rule would keep them from sharing passes."""
    decoder = Decoder(target, make_drafter("draft-model", target))
    request = decoder.request(random_prompts(1)[0], read_options({"temperature": 0.8}))
    assert decoder.rule(request).name == "traversal"
    assert decoder.rule(replace(request, drafts=frozenset())).name == "match"


@pytest.mark.parametrize("names", [["head"], ["ngrams"], ["answers"], ["head", "ngrams"]])
def test_each_part_of_a_drafter_drafts_for_those_who_want_it(
    names, target, make_drafter, monkeypatch
) -> None:
    asked = set()

    def spy(cls: type, method: str, name: str) -> None:
        real = getattr(cls, method)
        monkeypatch.setattr(cls, method, lambda *given: asked.add(name) or real(*given))

    spy(ParallelSession, "propose", "head")
    spy(NgramTable, "after", "ngrams")
    spy(Earlier, "continuations", "answers")
    drafter = make_drafter("parallel:own", target)
    lookup = StoreLookup(make_drafter("ngrams", target).table, Earlier())
    decoder = Decoder(target, WithLookup(drafter, lookup))
    assert decoder.drafter.names == ("head", "ngrams", "answers")
    request = decoder.request(random_prompts(1)[0], read_options({"max_new_tokens": LENGTH}))
    rows = decoder.running_rows(1)
    rows.admit([Ticket(0, replace(request, drafts=frozenset(names)))])
    while rows.count:
        rows.step()
    assert asked == {*names}


def test_steps_without_drafts_ask_no_drafter_and_teach_the_planner_nothing(
    target, make_drafter, monkeypatch
) -> None:
    decoder = Decoder(target, make_drafter("eagle3:own", target), adaptive=True)
    asked, real = [], Stepper.propose
    monkeypatch.setattr(
        Stepper, "propose", lambda self, *given: asked.append(self.run.mix) or real(self, *given)
    )
    settings = read_options({"max_new_tokens": LENGTH})
    request = decoder.request(random_prompts(1)[0], settings)
    for wants in (frozenset[str](), None):
        rows = decoder.running_rows(2)
        rows.admit([Ticket(0, replace(request, drafts=wants))])
        before = len(asked)
        while rows.count:
            rows.step()
        assert (len(asked) > before) == (wants is None)
    assert isinstance(decoder.plans, Plans)
    assert {mix for *_, mix in decoder.plans.plans} == {frozenset()}
