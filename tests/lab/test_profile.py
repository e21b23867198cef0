"""Ledgers add up, and the plan marks the size that it finds best."""

import json
from dataclasses import replace

import pytest
import torch

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.trees.tree import Budget
from drafthead.heads.growing.static import StaticTrees
from drafthead.infer import Decoder
from drafthead.infer.engine.stats import DecodeStats
from drafthead.infer.planning.planner import AdaptivePlan
from drafthead.infer.planning.step_costs import StepCosts
from drafthead.lab.races.contestants import Ours
from drafthead.lab.races.race import HOST, PLAIN, race, seconds_of
from drafthead.lab.tree_sizes import plan_report, plan_rows, reason

GREEDY = SamplingConfig()
PROMPTS = [[9, 10, 11], [20, 21]]
SMALL, LARGE = Budget(4, 2), Budget(8, 3)


def test_a_ledger_divides_an_account_by_its_steps() -> None:
    stats = DecodeStats(decode_seconds=10.0, steps=2, accept_lengths=[[3, 1]], decoded_tokens=[4])
    stats.seconds |= {"draft": 1.0, "verify": 6.0, "accept": 1.5, "commit": 0.5, "prefill": 99.0}
    assert seconds_of(stats) == {
        "draft": 0.5, "verify": 3.0, "accept": 0.75, "commit": 0.25, HOST: 0.5,
    }  # fmt: skip
    assert stats.tau == 2.0


def test_measured_phases_add_up_to_the_step(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    ways = [Ours(PLAIN, "none", GREEDY, Decoder(target)), Ours("head", "head", GREEDY, decoder)]
    records = race(ways, [PROMPTS], rounds=2, max_new_tokens=16, seed=0)
    plain, head = (record.stats() for record in records)
    for stats in (plain, head):
        seconds = seconds_of(stats)
        assert sum(seconds.values()) == pytest.approx(stats.decode_seconds / stats.steps)
        assert min(seconds.values()) >= 0
    assert plain.tau == 1 and seconds_of(plain)["draft"] == 0
    assert seconds_of(head)["draft"] > 0 and head.nodes_per_step == 10


def test_answers_of_one_token_have_no_step() -> None:
    with pytest.raises(UserError, match="no step"):
        seconds_of(DecodeStats())


def plan(plain: float, small: float, large: float) -> AdaptivePlan:
    """Trees of 4 and 8 nodes that bring 1.9 and 2.1 tokens, at the given seconds a step."""
    chances = {SMALL: (0.6, 0.3), LARGE: (0.65, 0.3, 0.15)}
    costs = StepCosts([replace(size, chances=found) for size, found in chances.items()])
    costs.set_timed({None: plain, SMALL: small, LARGE: large})
    return AdaptivePlan(costs)


@pytest.mark.parametrize(
    ("seconds", "nodes", "sentence"),
    [
        ((4, 5, 7), 4, "a tree of 4 nodes and depth 2: 1.90 tokens in 5e+03 ms beat plain"),
        ((0.004, 0.005, 0.0051), 8, "; a tree of 4 nodes and depth 2 would bring 1.90 in 5 ms"),
        ((0.004, 0.009, 0.012), 1, "plain decoding: no tree beats its 1 token in 4 ms clearly"),
    ],
)
def test_the_plan_marks_its_choice_and_says_why(seconds, nodes, sentence) -> None:
    rows = plan_rows(plan(*seconds))
    assert [row.nodes for row in rows] == [1, 4, 8] and rows[0].tokens == 1
    (chosen,) = [row for row in rows if row.chosen]
    assert chosen.nodes == nodes
    assert chosen.tokens_per_second == max(row.tokens_per_second for row in rows)
    assert all(r.tokens_per_second == pytest.approx(r.tokens / r.step_seconds) for r in rows)
    assert sentence in reason(rows)


def test_counts_without_their_total_are_no_chances() -> None:
    assert StaticTrees({(): 4, (0,): 3}, 1).chances(Budget(2, 1)) == (0.75,)
    assert StaticTrees({(0,): 3}, 1).chances(Budget(2, 1)) is None


def test_a_plan_is_written_as_json(tmp_path) -> None:
    rows = plan_rows(plan(0.004, 0.005, 0.0051))
    about = {"head": "h", "target": "t", "dtype": "float32"}
    plan_report(rows, ["because"], about).write(tmp_path / "new" / "plan.json")
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["choice"] == {"nodes": 8, "depth": 3} and content["reason"] == "because"
    assert [size["nodes"] for size in content["sizes"] if size["chosen"]] == [8]


def test_a_profiler_sees_the_phases_of_a_step(target) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Decoder(target).generate([9, 10, 11], max_new_tokens=4)
    seen = {event.key for event in profile.key_averages()}
    assert {"drafthead::prefill", "drafthead::verify", "drafthead::commit"} <= seen
