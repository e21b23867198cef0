"""Ledgers add up, bandwidth is plausible, and the plan marks the size that it finds best."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import llama_config
from transformers import LlamaForCausalLM

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.heads.growing.static import StaticTrees
from drafthead.infer import Decoder
from drafthead.infer.engine.planner import AdaptivePlan
from drafthead.infer.engine.stats import DecodeStats
from drafthead.infer.engine.step_costs import StepCosts
from drafthead.lab.profiling import bandwidth
from drafthead.lab.profiling.bandwidth import (
    BandwidthBound,
    bandwidth_bound,
    copy_bandwidth,
    weight_bytes,
)
from drafthead.lab.profiling.measured import measured_profile
from drafthead.lab.profiling.pass_times import paid_budgets, time_passes
from drafthead.lab.profiling.plan_table import plan_rows, reason
from drafthead.lab.races.ledger import HOST, ledger_of
from drafthead.lab.races.race import RaceTerms
from drafthead.lab.reports.profiling import plan_report

PROMPTS = [[9, 10, 11], [20, 21]]
CPU = torch.device("cpu")
SMALL, LARGE = Budget(4, 2), Budget(8, 3)


def test_a_ledger_divides_an_account_by_its_steps() -> None:
    stats = DecodeStats(decode_seconds=10.0, steps=2, accept_lengths=[[3, 1]], decoded_tokens=[4])
    stats.seconds |= {"draft": 1.0, "verify": 6.0, "accept": 1.5, "commit": 0.5, "prefill": 99.0}
    ledger = ledger_of(stats)
    assert ledger.seconds == {
        "draft": 0.5, "verify": 3.0, "accept": 0.75, "commit": 0.25, HOST: 0.5,
    }  # fmt: skip
    assert (ledger.step_seconds, ledger.tau, ledger.share("verify")) == (5.0, 2.0, 0.6)


def test_measured_phases_add_up_to_the_step(target, make_drafter, monkeypatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER", 2**22)
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    terms = RaceTerms(max_new_tokens=16, rounds=2, batch_size=2)
    ledgers = measured_profile(decoder, "head", PROMPTS, terms).ledgers
    for ledger in ledgers.values():
        assert sum(ledger.seconds.values()) == pytest.approx(ledger.step_seconds)
        assert min(ledger.seconds.values()) >= 0
    assert ledgers["plain"].tau == 1 and ledgers["plain"].seconds["draft"] == 0
    assert ledgers["head"].seconds["draft"] > 0 and ledgers["head"].nodes == 10


def test_answers_of_one_token_have_no_step(target) -> None:
    with pytest.raises(UserError, match="no decoding to time"):
        measured_profile(Decoder(target), "none", PROMPTS, RaceTerms(max_new_tokens=1))
    with pytest.raises(UserError, match="no step"):
        ledger_of(DecodeStats())


def test_every_drafter_is_timed_alone(drafter_name, target, make_drafter) -> None:
    drafter = make_drafter(drafter_name, target)
    passes = time_passes(target, drafter, batch=2, sizes=(1, 4), rounds=1)
    assert passes.columns == 256 and list(passes.verify) == [1, 4]
    assert list(passes.draft) == paid_budgets(drafter)
    assert min(*passes.verify.values(), *passes.draft.values()) > 0


def test_copying_is_as_fast_as_memory_can_be(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER", 2**25)
    assert 1e8 < copy_bandwidth(CPU) < 5e12


def test_a_pass_reads_shared_embeddings_whole_and_others_by_row() -> None:
    size, vocab = 8, 32
    config = llama_config(
        vocab_size=vocab, hidden_size=size, num_hidden_layers=1, num_attention_heads=2
    )
    layers = 4 * size * size + 3 * size * 16 + 3 * size  # projections, MLP, norms
    for tied, table in ((True, vocab * size), (False, vocab * size + 5 * size)):
        config.tie_word_embeddings = tied
        target = Target(LlamaForCausalLM(config))
        buffers = sum(buffer.nbytes for buffer in target.model.buffers())
        assert weight_bytes(target, tokens=5) == 4 * (layers + table) + buffers


def test_the_bound_is_the_time_to_move_the_weights(target, monkeypatch) -> None:
    bound = BandwidthBound(10**9, 2e10, plain_step_seconds=0.1, all_experts_counted=False)
    assert (bound.seconds, bound.reached) == (0.05, 0.5)
    monkeypatch.setattr(bandwidth, "copy_bandwidth", lambda device: 1e10)
    measured = bandwidth_bound(target, 1, 0.01)
    assert 0 < measured.reached < 1 and not measured.all_experts_counted


def plan(plain: float, small: float, large: float) -> AdaptivePlan:
    """Trees of 4 and 8 nodes that bring 1.9 and 2.1 tokens, at the given seconds a step."""
    chances = {SMALL: (0.6, 0.3), LARGE: (0.65, 0.3, 0.15)}
    costs = StepCosts([replace(size, chances=found) for size, found in chances.items()])
    costs.set_timed({None: plain, SMALL: small, LARGE: large})
    return AdaptivePlan(costs)


@pytest.mark.parametrize(
    ("seconds", "nodes", "sentence"),
    [
        ((4, 5, 7), 4, "4 nodes: 1.90 tokens in 5e+03 ms beat plain decoding's 1 in 4e+03 ms"),
        ((0.004, 0.005, 0.0051), 8, "by 1.65x; 4 nodes would bring 1.90 in 5 ms, 1.52x"),
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


def test_a_plan_is_written_as_json_and_picture(tmp_path) -> None:
    rows = plan_rows(plan(0.004, 0.005, 0.0051))
    about = {"head": "h", "target": "t", "dtype": "float32"}
    plan_report(rows, ["because"], about).write(tmp_path / "new" / "plan.json")
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["choice"] == {"nodes": 8, "depth": 3} and content["reason"] == "because"
    assert [size["nodes"] for size in content["sizes"] if size["chosen"]] == [8]
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_profiler_sees_the_phases_of_a_step(target) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Decoder(target).generate([9, 10, 11], max_new_tokens=4)
    seen = {event.key for event in profile.key_averages()}
    assert {"drafthead::prefill", "drafthead::verify", "drafthead::commit"} <= seen
