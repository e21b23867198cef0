"""Acceptance traces, cost curves, and what they tell together."""

import json
from pathlib import Path

import pytest
import torch

from drafthead.core.errors import UserError
from drafthead.lab.paying.acceptance_trace import (
    AcceptanceTrace,
    TracedAnswer,
    steps,
    traced,
    tree_of,
)
from drafthead.lab.paying.costs import CostCurve, StepTime, read_costs
from drafthead.lab.paying.forecast import Forecasts
from drafthead.train.data.packing import PackedData
from drafthead.train.data.sequences import TokenSequence, TokenTable
from drafthead.train.learning.ranks import Ranked, RankedAnchors, count_paths

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED, SMOLLM2 = BENCHMARKS / "gpu" / "recorded.json", BENCHMARKS / "smollm2"


def ranked_rows() -> Ranked:
    """Three answers of random ranks in two rows; the third one has a turn in its middle."""
    generator = torch.Generator().manual_seed(0)
    keys = [
        ((0, 1), range(4, 40)),
        ((0, 2), range(63, 80)),
        ((1, 1), [*range(9, 30), *range(50, 70)]),
    ]
    conversations = [key for key, places in keys for _ in places]
    anchors = [place for _, places in keys for place in places]
    ranks = torch.randint(0, 4, (len(anchors), 3), generator=generator)
    ids = (torch.zeros(length, dtype=torch.int32) for length in (60, 30, 90))
    table = TokenTable.of(TokenSequence(one, one == 0) for one in ids)
    return Ranked(RankedAnchors(ranks, conversations, anchors), PackedData(table, ((0, 1), (2,))))


def test_a_traces_steps_decode_the_answers_as_evaluation_does(tmp_path: Path) -> None:
    source = ranked_rows()
    sizes, answers = traced([source])
    assert [answer.context for answer in answers] == [5, 4, 10, 51]
    counts = count_paths(source.ranks.ranks)
    for place, size in enumerate(sizes):
        lengths = [length for answer in answers for length in answer.lengths[place]]
        tree = tree_of(counts, *size)
        assert sum(lengths) / len(lengths) == pytest.approx(source.ranks.tau(tree))
    trace = AcceptanceTrace("target", "head", "eagle3", sizes, answers)
    trace.write(tmp_path / "trace.json")
    assert AcceptanceTrace.read(tmp_path / "trace.json") == trace
    assert steps([2, 0, 0, 0, 1]) == [3, 1]


def curve_of(draft: float, rows: tuple[int, ...] = (1, 2, 4, 8)) -> CostCurve:
    """Steps of a machine that computes 8 tokens in the time of one, and more in proportion."""
    points = [StepTime(n, max(8, n * b), 0, b) for n in (1, 2, 4, 8, 16) for b in rows]
    return CostCurve([*points, StepTime(4, 8 + draft, 3), StepTime(1, 9.0, columns=4096)])


def test_a_curve_goes_through_its_points_and_is_not_asked_beyond_them() -> None:
    curve = curve_of(3.0)
    assert curve.ms(1, 256, 1, 0) == pytest.approx(8, rel=0.02)
    assert curve.ms(4, 256, 8, 0) == pytest.approx(32, rel=0.02)
    assert curve.ms(1, 256, 4, 3) == pytest.approx(11, rel=0.02)
    assert curve.ms(1, 4096, 1, 0) == pytest.approx(9, rel=0.05)
    assert curve.covers(8, 16)
    assert not curve.covers(16, 16)


def test_drafting_stops_paying_where_tokens_cost_time() -> None:
    answers = [TracedAnswer(None, 0.0, 100, [[2] * 30, [3] * 20]) for _ in range(9)]
    trace = AcceptanceTrace("target", "head", "eagle3", [(2, 1), (4, 3)], answers)
    found = list(Forecasts(trace, curve_of(3.0)).by_batch())
    assert [f.where for f in found] == ["1", "2", "4", "8", "16", "32", "64"]
    assert (found[0].nodes, found[0].depth) == (4, 3)
    assert found[0].speedup.value == pytest.approx(3 * 8 / 11, rel=0.02)
    assert found[0].speedup.low == pytest.approx(found[0].speedup.value)  # all answers alike
    assert found[2].nodes == 2  # 8 tokens are free
    assert found[-1].speedup.value < 1
    short = CostCurve([StepTime(1, 8.0, columns=64), StepTime(4, 9.0, 3, columns=64)])
    assert [f.where for f in Forecasts(trace, short).by_context()] == ["128"]


def test_costs_are_read_from_what_the_verbs_and_the_gpu_benchmark_write(tmp_path: Path) -> None:
    tree = {"rows_timed": 2, "sizes": [{"nodes": 4, "depth": 2, "step_seconds": 0.007}]}
    files = []
    for name, content in (
        ("tree", tree),
        ("own", {"steps": [{"nodes": 1, "ms": 5}]}),
    ):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(content))
    found = [(p.nodes, p.depth, p.batch, round(p.ms, 3)) for p in read_costs(files, None, "eagle3")]
    assert found == [(4, 2, 2, 7), (1, 0, 1, 5)]

    gpu = read_costs([RECORDED], "SmolLM2 compiled layers", "eagle3")
    assert StepTime(1, 1.367) in gpu  # the later phase, and not the seconds that measuring took
    assert StepTime(16, 5.567, 6) in gpu
    assert StepTime(1, 2.766, batch=64, columns=1024) in gpu
    with pytest.raises(UserError, match="--model 9B must be one of 8B as it is, 8B compiled"):
        read_costs([RECORDED], "9B", "eagle3")
    with pytest.raises(UserError, match="no file of --cost holds steps"):
        read_costs([SMOLLM2 / "comparison.json"], None, "eagle3")


def test_the_verb_prints_and_writes_and_refuses_what_is_no_trace(tmp_path: Path, drafthead) -> None:
    sizes, answers = traced([ranked_rows()])
    AcceptanceTrace("target", "head", "eagle3", sizes, answers).write(tmp_path / "trace.json")

    def pays(trace: Path) -> tuple[int, str]:
        words = ["--trace", str(trace), "--cost", str(RECORDED), "--model", "8B compiled layers"]
        output = ["--output", str(tmp_path / "pays.json")]
        status, out, err = drafthead("explain", "pays", *words, *output)
        return status, out + err

    status, printed = pays(tmp_path / "trace.json")
    assert status == 0
    assert "times plain decoding, with trees of" in printed
    assert json.loads((tmp_path / "pays.json").read_text())["batch"][0]["speedup"]["value"] > 0
    status, printed = pays(RECORDED)
    assert status == 2
    assert "is not an acceptance trace" in printed


@pytest.mark.parametrize(("costs", "race"), [("avx512", "comparison"), ("avx2", "eagle3_h100")])
def test_predictions_are_near_our_own_races(costs: str, race: str) -> None:
    trace = AcceptanceTrace.read(SMOLLM2 / "pays" / "trace.json")
    curve = CostCurve(read_costs([SMOLLM2 / "pays" / f"{costs}.json"], None, "eagle3"))
    predicted = next(Forecasts(trace, curve).by_batch()).speedup
    rows = json.loads((SMOLLM2 / f"{race}.json").read_text())["rows"]
    heads = [row["speedup"] for row in rows if row["mode"].startswith("head")]
    measured = heads[0] if race == "comparison" else heads[3]  # of the shipped head, alone
    assert predicted.low < measured < predicted.high
    assert predicted.value == pytest.approx(measured, rel=0.05)
