"""What a decoder learns about its steps: begun without a clock, shared, kept, and never needed."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planned import size_of

from drafthead.core.sampling import RowSampling, SamplingConfig
from drafthead.core.storage import disk_cache
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.heads.growing.static import chain_budgets
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.planning.draft_acceptance import Size
from drafthead.infer.request.request import DecodeOptions
from drafthead.infer.timing import plans as plans_module
from drafthead.infer.timing.plans import Plans, StepKind, costs_file, in_plain_steps
from drafthead.infer.timing.step_timing import VISIT_STEPS
from drafthead.infer.verifiers import verifier_for

DRAFTER = PromptLookup(2)
DRAFTER.budgets = chain_budgets(2)
KIND = StepKind("greedy", 1, filters=False, processors=False)
GREEDY = RowSampling((SamplingConfig(),))
CHEAP = {None: 0.5} | dict.fromkeys(DRAFTER.budgets, 0.51)
DEAR = {None: 0.5} | dict.fromkeys(DRAFTER.budgets, 5.0)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch, target) -> Path:
    """Where costs are kept in these tests; it does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    disk_cache.log_unusable.cache_clear()
    return costs_file(target, DRAFTER)


@pytest.fixture
def passes(target: Target, monkeypatch) -> list[int]:
    """The nodes of each pass of the target."""
    seen: list[int] = []

    def counting(run: Callable) -> Callable:
        def counted(input_ids, *arguments, **options):
            seen.append(input_ids.shape[1])
            return run(input_ids, *arguments, **options)

        return counted

    for name in ("read", "run"):  # a prompt, a step
        monkeypatch.setattr(target, name, counting(getattr(target, name)))
    return seen


def decode(plans: Plans, drafted: float, kind: StepKind = KIND, steps: int = 200) -> None:
    """An answer whose plain steps take 1 and whose drafted ones take `drafted`; all is accepted."""
    planner = plans.planner(kind, 0.0)
    for _ in range(steps):
        size = size_of(planner)
        planner.learn([1 + (size.levels if size else 0)], drafted if size else 1.0)
    planner.finish()


def set_timed(plans: Plans, kind: StepKind, seconds: dict[Size, float]) -> None:
    """What timing on purpose does."""
    plans.costs(kind).set_timed(seconds)
    plans.keep_timed(kind)


def ratios(plans: Plans, kind: StepKind = KIND) -> np.ndarray:
    return np.exp(in_plain_steps(plans.costs(kind)))


def test_costs_of_other_kernels_are_kept_in_another_file(target, file, monkeypatch) -> None:
    monkeypatch.setattr(type(target.backend), "kernels", "another library")
    assert costs_file(target, DRAFTER) != file


# ---- before the first token ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_an_answer_makes_no_passes_but_its_own(target, passes, rows) -> None:
    decoder = Decoder(target, DRAFTER, adaptive=True)
    stats = decoder.generate([[3, 4, 5]] * rows, max_new_tokens=24).stats
    assert len(passes) == 1 + stats.steps


def test_warming_up_times_every_size_once_for_all_processes(target, passes) -> None:
    decoder = Decoder(target, DRAFTER, adaptive=True)
    decoder.warm_up((1, 2))
    sizes = len(DRAFTER.budgets)
    assert len(passes) > 2 * 2 * sizes * VISIT_STEPS
    two = StepKind("greedy", 2, filters=False, processors=False)
    assert decoder.plans.costs(KIND).was_timed and decoder.plans.costs(two).was_timed
    passes.clear()
    later = Decoder(target, DRAFTER, adaptive=True)
    later.warm_up((1, 2))
    # After the prompt a step of every size, and a plain one before each: graphs are made, if any.
    assert len(passes) == 2 * (1 + 2 * sizes)
    assert ratios(later.plans) == pytest.approx(ratios(decoder.plans))


def test_warming_up_serves_every_rule_and_decoders_without_a_plan(target) -> None:
    adaptive = Decoder(target, DRAFTER, adaptive=True)
    adaptive.warm_up(temperature=0.8, top_p=0.9)
    (kind,) = (k for k, costs in adaptive.plans.by_kind.items() if costs.was_timed)
    assert kind == StepKind("match", 1, filters=True, processors=False)
    adaptive.warm_up(temperature=0.8, verifier="rejection")
    Decoder(target, DRAFTER).warm_up(continue_final_message=True)  # an option of chats
    Decoder(target).warm_up((2,))


# ---- what a new kind of steps begins with -------------------------------------------------------


def test_a_new_batch_size_begins_where_the_nearest_one_is(target) -> None:
    plans = Plans(target, DRAFTER)
    one, two, eight = (StepKind("greedy", rows, False, False) for rows in (1, 2, 8))
    set_timed(plans, one, DEAR)
    set_timed(plans, eight, CHEAP)
    assert ratios(plans, two) == pytest.approx(ratios(plans, one))
    four = StepKind("greedy", 4, False, False)
    assert ratios(plans, four) == pytest.approx(ratios(plans, eight))
    assert size_of(plans.planner(four, 0.0)) is not None, "drafts from the first step on"
    assert size_of(plans.planner(two, 0.0)) is None


def test_a_batch_may_lose_fewer_steps_to_drafts(target) -> None:
    plans = Plans(target, DRAFTER)
    first = [
        plans.plan(StepKind("greedy", rows, False, False), 0.0).settings.first_loss
        for rows in (1, 4, 16)
    ]
    assert first == [8.0, 4.0, 2.0]


def test_a_new_rule_begins_with_the_costs_of_the_same_rows() -> None:
    greedy = StepKind("greedy", 4, filters=False, processors=False)
    match = StepKind("match", 4, filters=True, processors=False)
    assert match.distance(greedy) == 2 < match.distance(StepKind("match", 32, True, False)) == 3


# ---- long contexts ------------------------------------------------------------------------------


def test_a_long_text_makes_no_draft_dear_for_short_ones(target) -> None:
    """After thousands of tokens drafts are not worth their time; the next answer is short again."""
    plans = Plans(target, DRAFTER)
    set_timed(plans, KIND, CHEAP)
    planner = plans.planner(KIND, 0.0)
    for columns in range(200, 5000, 8):
        size = size_of(planner)
        took = 5.0 if size is not None and columns > 1024 else 1.0
        planner.learn([1 + (size.levels if size else 0)], took)
        planner.meet(1, columns, GREEDY)
    assert size_of(planner) is None, "drafts cost five plain steps"
    planner.finish()
    assert size_of(plans.planner(KIND, 0.0)) is not None
    assert {kind.columns for kind in plans.by_kind} == {1024, 2048, 4096, 8192}


def test_a_longer_context_begins_with_what_drafts_were_found_to_bring(target) -> None:
    plans = Plans(target, DRAFTER)
    set_timed(plans, KIND, CHEAP)
    planner = plans.planner(KIND, 0.0)
    for _ in range(200):
        size_of(planner)
        planner.learn([1], 1.0)  # nothing is ever accepted
    longer = plans.plan(replace(KIND, columns=2048), 0.0)
    near = plans.plan(KIND, 0.0)
    assert longer.acceptance.tokens() == pytest.approx(near.acceptance.tokens())
    assert longer.draft_account == near.draft_account


def test_the_context_of_a_batch_is_that_of_its_active_rows(target) -> None:
    request = Decoder(target).request([[3, 4, 5], [3] * 201], DecodeOptions(max_new_tokens=8))
    run, two = BatchRun(request, target.device), StepKind("greedy", 2, False, False)
    assert run.columns == 102 and StepKind.of(run, verifier_for("auto", 0.0)) == two
    run.take([[9], [9]])
    assert run.columns == 103
    run.rows[0].finish_reason = "length"
    assert run.columns == 202
    run.end("length")
    assert run.columns == 0


# ---- batches that rows join and leave ------------------------------------------------------------


def test_the_last_rows_of_a_batch_make_no_draft_cheap_for_many(target) -> None:
    """Of 16 rows a draft takes five plain steps, of the one that is left hardly one."""
    plans, many = Plans(target, DRAFTER), replace(KIND, rows=16)
    for kind, seconds in ((KIND, CHEAP), (many, DEAR)):
        set_timed(plans, kind, seconds)
    before = ratios(plans, many)
    planner = plans.planner(many, 0.0)
    for rows in [16] * 40 + [1] * 200:
        planner.meet(rows, 100, GREEDY)
        size = size_of(planner)
        took = CHEAP if rows == 1 else DEAR
        planner.learn([1 + (size.levels if size else 0)] * rows, took[size])
    assert size_of(planner) is not None, "one row drafts"
    planner.meet(16, 100, GREEDY)
    assert size_of(planner) is None, "sixteen do not"
    planner.finish()
    assert ratios(plans, many) == pytest.approx(before, rel=0.05)


def test_a_batch_of_several_laws_has_plans_of_its_own_and_its_rest_goes_back(target) -> None:
    """Greedy rows among others follow the rule of these; those that are left have their own."""
    plans = Plans(target, DRAFTER)
    planner, drawn = plans.planner(KIND, 0.0), SamplingConfig(0.7, top_p=0.9)
    for rows in (GREEDY.rows, (*GREEDY.rows, drawn), (drawn, drawn), GREEDY.rows):
        planner.meet(len(rows), 100, RowSampling(rows))
    known = {(kind.rule, kind.rows, kind.filters, heat) for kind, heat, _ in plans.plans}
    assert known == {
        ("greedy", 1, False, 0.0), ("match", 2, True, None), ("match", 2, True, 0.7),
    }  # fmt: skip
    assert planner.plan is plans.plan(KIND, 0.0)


# ---- a busy hour --------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "answers"), [(8, 1), (1, 100)])
def test_a_size_that_a_busy_hour_has_ruled_out_is_tried_again(target, processes, answers) -> None:
    """Answers of 16 quick steps, each in a process of its own or all in one."""

    def begins_with() -> Budget | None:
        return size_of(Plans(target, DRAFTER).planner(KIND, 0.0))

    set_timed(Plans(target, DRAFTER), KIND, DEAR)
    assert begins_with() is None
    for _ in range(processes):
        plans = Plans(target, DRAFTER)
        for _ in range(answers):
            decode(plans, drafted=1.1, steps=16)
    assert begins_with() is not None


# ---- kept on disk -------------------------------------------------------------------------------


def test_what_an_answer_has_taught_serves_the_next_process(target, file) -> None:
    plans = Plans(target, DRAFTER)
    decode(plans, drafted=1.4)
    later = Plans(target, DRAFTER)
    assert ratios(later) == pytest.approx(ratios(plans), rel=1e-6)
    assert ratios(later)[1:].max() == pytest.approx(1.4, rel=0.1)
    assert size_of(later.planner(KIND, 0.0)) is not None
    assert not later.costs(KIND).was_timed


def test_only_what_is_new_is_written(target, monkeypatch) -> None:
    writes: list[object] = []
    write = plans_module.write_costs
    monkeypatch.setattr(plans_module, "write_costs", lambda *a: (writes.append(a), write(*a)))
    plans = Plans(target, DRAFTER)
    for _ in range(20):
        decode(plans, drafted=1.4)
    assert 1 <= len(writes) <= 3
    decode(plans, drafted=3.0, steps=400)
    assert len(writes) >= 2


def test_processes_keep_what_others_have_learnt(target, file) -> None:
    other = StepKind("match", 8, filters=False, processors=False)
    first, second = Plans(target, DRAFTER), Plans(target, DRAFTER)
    assert not first.by_kind and not second.by_kind
    set_timed(first, other, DEAR)
    set_timed(second, KIND, CHEAP)
    assert set(Plans(target, DRAFTER).by_kind) == {other, KIND}


def entry(**changes: object) -> bytes:
    size = 1 + len(DRAFTER.budgets)
    kind = {"rule": "greedy", "rows": 1, "filters": False, "processors": False}
    whole = {
        "kind": kind,
        "was_timed": True,
        "mean": [0.0] * size,
        "covariance": np.eye(size).tolist(),
    }
    return json.dumps([whole | changes]).encode()


DAMAGED = [
    b"", b"5", b'{"a": 1}', b"[5]", b"\xff", b"[" * 10**5, entry()[:-3], b"[{}]",
    entry(mean=[0.0]), entry(mean=[0.0, float("nan"), 0.0]), entry(mean=[0.0, 1e9, 0.0]),
    entry(mean=["a", 0, 0]), entry(mean=None), entry(covariance=[[1.0]]),
    entry(covariance=np.full((3, 3), float("inf")).tolist()),
    entry(covariance=(-np.eye(3)).tolist()), entry(covariance=np.triu(np.ones((3, 3))).tolist()),
    entry(kind={"rule": "greedy"}),
    entry(kind={"rule": 5, "rows": 1, "filters": 0, "processors": 0}),
    entry(kind={"rule": "match", "rows": 0, "filters": False, "processors": False}),
]  # fmt: skip


def test_the_undamaged_entry_is_read(target, file) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(entry())
    assert Plans(target, DRAFTER).costs(KIND).was_timed


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_named_and_written_again(content, target, file, caplog) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            plans = Plans(target, DRAFTER)
            decode(plans, drafted=1.4)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged; the costs of steps are learnt again"
    ]


def test_an_answer_needs_no_cache(target, tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "regular").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "regular"))
    decoder = Decoder(target, DRAFTER, adaptive=True)
    expected = Decoder(target).generate([[3, 4, 5]], max_new_tokens=24).sequences
    with caplog.at_level(logging.WARNING):
        for prompts in ([[3, 4, 5]], [[3, 4, 5]] * 3):
            found = decoder.generate(prompts, max_new_tokens=24).sequences
            assert found == expected * len(prompts)
    assert len(caplog.records) == 1 and "Not a directory" in caplog.text


# ---- seeds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["match", "rejection", "traversal", "typical"])
def test_a_seed_fixes_the_text_whatever_steps_have_taken(
    target, make_drafter, tmp_path, monkeypatch, rule
) -> None:
    """And whatever other rows are decoded beside it."""
    drafter = make_drafter("medusa:own", target)
    texts = []
    for drafted, folder in ((1.0, "a"), (1.3, "b"), (9.0, "c")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        decoder = Decoder(target, drafter, adaptive=True)
        seconds = {None: 1.0} | {b: drafted + b.nodes / 1e4 for b in drafter.budgets}
        for name in ("match", "rejection", "traversal", "typical"):
            set_timed(decoder.plans, StepKind(name, 1, False, False), seconds)
        ask = {"temperature": 1.0, "max_new_tokens": 24, "verifier": rule}
        texts.append(decoder.generate([[9, 10, 11]], seed=7, **ask).sequences[0])
        pair = decoder.generate([[9, 10, 11], [12, 13]], seed=[7, 3], **ask)
        texts.append(pair.sequences[0])
    assert texts == [texts[0]] * 6
