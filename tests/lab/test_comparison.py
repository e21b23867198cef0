"""The arithmetic of comparisons, on numbers small enough to check by hand."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from matplotlib import pyplot as plt

from drafthead.backends.cuda.recorded import Recorded
from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Decoder
from drafthead.infer.answers.results import repeated_ngram_share
from drafthead.infer.engine.stats import DecodeStats
from drafthead.lab.races.comparison import ComparisonRow, _interval, divergences, rows_of
from drafthead.lab.races.contestants import Ours, Transformers, up_to_end
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.races.race import (
    GENERATE,
    Contestant,
    RacedAnswers,
    RaceRecord,
    bound,
    prepare,
    race,
)
from drafthead.lab.reports.comparison import (
    category_tables,
    comparison_report,
    divergence_notes,
    draw,
    noise_notes,
    race_table,
)
from drafthead.lab.speedup_model import chain_speedup, predict_chain


def test_tau_counts_returned_tokens_per_pass() -> None:
    stats = DecodeStats(accept_lengths=[[1, 3, 2, 1], [4]], decoded_tokens=[7, 2])
    assert stats.tau == 9 / 5


def test_acceptance_by_depth_is_conditional() -> None:
    stats = DecodeStats(accept_lengths=[[1, 3, 2, 1]])
    assert stats.acceptance_by_depth() == [2 / 4, 1 / 2]
    assert DecodeStats(accept_lengths=[[1, 1]]).acceptance_by_depth() == []


def test_repeated_ngrams() -> None:
    assert repeated_ngram_share([[1, 2, 3, 4]], n=2) == 0
    assert repeated_ngram_share([[1, 2, 1, 2, 1]], n=2) == 2 / 4
    assert repeated_ngram_share([[1]], n=2) == 0


def test_leviathans_formula() -> None:
    assert chain_speedup(alpha=0.5, length=2, cost=0) == pytest.approx(1.75)
    assert chain_speedup(alpha=1.0, length=4, cost=0.25) == pytest.approx(5 / 2)
    assert chain_speedup(alpha=0.0, length=4, cost=0.25) == pytest.approx(1 / 2)


def test_alpha_counts_only_tokens_that_were_tried() -> None:
    # Accept lengths 5 (all four), 3 (two of three tried), 1 (none of one).
    prediction = predict_chain([5, 3, 1], length=4, cost=0.1)
    assert prediction.alpha == pytest.approx(6 / 8)
    assert prediction.best_speedup >= prediction.speedup
    assert predict_chain([1, 1], length=4, cost=0.5).best_length == 0


def test_the_bound_is_tau_over_the_cost_of_a_step() -> None:
    phases = {"draft": 0.2, "verify": 1.2, "accept": 0.05, "commit": 0.05}
    stats = DecodeStats(phases, 2.0, 1, accept_lengths=[[3]], decoded_tokens=[3])
    plain = DecodeStats({**dict.fromkeys(phases, 0.0), "verify": 1.0}, 1.0, 1)
    assert bound(stats, plain) == pytest.approx(2.0)


@pytest.fixture(scope="module")
def small_race(target, make_drafter):
    """Plain, generate and Medusa on two prompts in float32."""
    greedy = SamplingConfig()
    contestants = [
        Ours("plain", "none", greedy, Decoder(target)),
        Transformers("generate", "none", greedy, target),
        Transformers("generate + assistant", "draft model", greedy, target, target, 3),
        Ours("head", "medusa", greedy, Decoder(target, make_drafter("medusa:tree", target))),
    ]
    prompts = [[9, 10, 11], [20, 21]]
    batches = [[p] for p in prompts]
    for contestant in contestants:
        prepare(contestant, batches[0], 24, seed=0)
    records = race(contestants, batches, 2, 24, seed=0)
    return records, prompts


def test_all_contestants_are_counted_alike(small_race) -> None:
    records, _ = small_race
    first = [record.first_round() for record in records]
    assert first[1:] == first[:-1], "greedy answers agree in float32"
    for record in records[:2]:
        for batch in record.answers[0]:
            assert batch.decoded_tokens == len(batch.sequences[0]) - 1
    for batch in records[2].answers[0]:  # the assistant's first tokens come several at a time
        assert 1 <= len(batch.sequences[0]) - batch.decoded_tokens <= 4


@pytest.fixture(scope="module")
def batch_race(target, make_drafter):
    """A race without an assistant: three prompts, of which two are decoded together."""
    greedy = SamplingConfig()
    contestants = [
        Ours("plain", "none", greedy, Decoder(target)),
        Transformers("generate", "none", greedy, target),
        Ours("head", "medusa", greedy, Decoder(target, make_drafter("medusa:tree", target))),
    ]
    prompts = [[9, 10, 11], [20, 21], [7, 30, 31, 32]]
    batches = [prompts[:2], prompts[2:]]
    for contestant in contestants:
        prepare(contestant, batches[0], 24, seed=0)
    records = race(contestants, batches, 2, 24, seed=0)
    return records, prompts


def test_prompts_that_are_decoded_together_have_the_answers_of_each_alone(
    batch_race, target
) -> None:
    records, prompts = batch_race
    alone = [Decoder(target).generate(p, max_new_tokens=24).sequences[0] for p in prompts]
    for record in records:
        assert record.first_round() == alone
        batch = record.answers[0][0]
        assert batch.decoded_tokens == sum(map(len, batch.sequences)) - 2, "two first tokens"
    assert divergences(records, prompts, target) == []


def test_figures_of_batches_count_all_rows_and_steps_once(batch_race) -> None:
    records, _ = batch_race
    plain, _, head = rows_of(records, 0.0, frozenset({7}))
    longest = [max(map(len, batch.sequences)) for batch in records[0].answers[0]]
    assert plain.steps == 2 * sum(length - 1 for length in longest)
    assert plain.tau == 1 and head.steps < plain.steps
    assert head.tokens == plain.tokens == 2 * sum(b.decoded_tokens for b in records[0].answers[0])


def test_an_answer_ends_with_its_first_end_token() -> None:
    assert up_to_end([5, 2, 0, 2, 0], {2, 3}) == [5, 2]
    assert up_to_end([5, 6], {2}) == [5, 6]
    assert up_to_end([2], {2}) == [2]


def test_baselines_have_speedup_one_over_themselves(small_race) -> None:
    records, _ = small_race
    plain, generate, assisted, head = rows_of(records, 0.0, frozenset({7}))
    assert plain.speedup == 1 and generate.speedup_hf == 1
    assert plain.tau == 1 and assisted.tau is None
    assert head.efficiency == pytest.approx(head.speedup / head.tau)
    assert head.speedup_range[0] <= head.speedup <= head.speedup_range[1]
    assert head.speedup_bound > 0
    assert sum(head.accept_length_counts.values()) > 0


def test_the_interval_of_a_speedup_is_that_of_resampled_prompts() -> None:
    """Two prompts, 3 and 1 times as fast in equal time: 2 is the speedup, from 1 to 3."""

    def record(mode: str, *tokens: int) -> RaceRecord:
        answers = [RacedAnswers([[0] * n], n, 1.0, 0.0, DecodeStats()) for n in tokens]
        return RaceRecord(Ours(mode, "none", SamplingConfig(), None), [answers])

    plain = record("plain", 10, 10)
    assert _interval(record("head", 30, 10), plain) == (1.0, 3.0)
    assert _interval(record("head", 20, 20), plain) == (2.0, 2.0)
    assert _interval(record("head", 20), record("plain", 10)) is None
    assert _interval(plain, plain) is None


def test_who_drafts_nothing_shows_the_noise(small_race) -> None:
    records, _ = small_race
    plain, _, _, head = rows_of(records, 0.0, frozenset({7}))
    assert noise_notes([plain, head]) == []
    (note,) = noise_notes([plain, replace(head, mode="model", tree_nodes=1.0, speedup=1.41)])
    assert note.startswith("model drafted nothing at temperature 0 and has 1.41 times the speed")


def test_categories_of_prompts_are_counted_apart(small_race) -> None:
    records, _ = small_race
    rows = rows_of(records, 0.0, frozenset({7}), ["maths", "prose"])
    plain, generate, _, head = rows
    assert all(row.categories.keys() == {"maths", "prose"} for row in rows)
    assert plain.categories["maths"].speedup == 1 and plain.categories["prose"].tau == 1
    assert generate.categories["maths"].tau is None
    stats = records[-1].part([1]).stats()
    assert head.categories["prose"].tau == stats.tau and head.categories["prose"].prompts == 1
    speedups = sorted(figures.speedup for figures in head.categories.values())
    assert speedups[0] <= head.speedup_range[1] and speedups[1] >= head.speedup_range[0]
    _, tau = category_tables(rows)
    assert tau.title == "tau by category" and tau.columns == ["mode", "T", "maths", "prose"]
    assert len(tau.rows) == len(rows)
    assert tau.rows[1][2:] == ["-", "-"], "of another engine nothing is known"


def test_one_category_is_no_table_and_answers_of_one_token_have_no_speed(small_race) -> None:
    records, _ = small_race
    assert not category_tables(rows_of(records, 0.0, frozenset({7}), ["maths", "maths"]))
    assert not category_tables(rows_of(records, 0.0, frozenset({7}), [None, None]))
    short = [
        replace(record, answers=[[RacedAnswers([[1]], 0, 0.0, 0.1)]] * 2) for record in records
    ]
    for record, old in zip(short, records, strict=True):
        record.answers = [[a, b[1]] for (a,), b in zip(record.answers, old.answers, strict=True)]
    rows = rows_of(short, 0.0, frozenset({7}), ["one token", "prose"])
    assert all(row.categories["one token"].speedup is None for row in rows)
    assert rows[-1].categories["prose"].speedup > 0


def test_a_divergence_is_located_and_its_gap_measured(small_race, target) -> None:
    records, prompts = small_race
    assert divergences(records, prompts, target) == []
    head = records[-1]
    answer = head.answers[0][0].sequences[0]
    right = answer[2]
    answer[2] = (right + 1) % 64
    (found,) = divergences(records, prompts, target)
    answer[2] = right
    assert (found.prompt, found.position, found.plain_token) == (0, 2, right)
    ids = torch.tensor([prompts[0] + answer[:2]])
    top = target.model(ids).logits[0, -1].topk(2).values
    assert found.top2_gap == pytest.approx(float(top[0] - top[1]), abs=1e-5)


def test_answers_of_transformers_are_not_counted_among_ours(small_race) -> None:
    rows = rows_of(small_race[0], 0.0, frozenset({7}))
    *_, head = rows
    ours, theirs = (
        Divergence(mode, 0, 3, 1, 2, 0.125, 0.125, 0.125) for mode in (head.mode, GENERATE)
    )
    equal, of_theirs = divergence_notes([theirs], rows, 2)
    assert equal == "greedy answers: all 2 equal plain decoding" and "1 of 4 differ" in of_theirs
    differ, first, _ = divergence_notes([theirs, ours], rows, 2)
    assert "1 of 2 differ" in differ and first.startswith(f"- {head.mode}, prompt 0, token 3: 2")


def test_a_report_is_a_table_a_picture_and_json(small_race, tmp_path) -> None:
    records, prompts = small_race
    rows = rows_of(records, 0.0, frozenset({7}))
    about = {
        "command": "drafthead compare", "machine": {"processor": "p", "threads": 1}, "target": "t",
        "dtype": "float32", "prompts": len(prompts), "max_new_tokens": 24, "rounds": 2,
        "batch_size": 1,
    }  # fmt: skip
    comparison_report(rows, ["a note"], about).write(tmp_path / "out" / "comparison.json")
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    wanted = {
        "mode", "drafter", "verifier", "tree_nodes", "temperature", "tokens", "seconds",
        "tokens_per_second", "tau", "acceptance_by_depth", "draft_cost", "speedup", "speedup_hf",
        "speedup_bound", "efficiency", "repeated_8gram_share", "peak_memory_bytes",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in content["rows"])
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert race_table(rows).markdown() in text and text.endswith("a note\n")
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_begins_with_model_generate_as_one() -> None:
    row = dict.fromkeys([field.name for field in fields(ComparisonRow)])
    row |= {"temperature": 0.0, "tokens_per_second": 20.0}
    ways = (("plain", 1.0, 5.0), ("generate", None, 1.0), ("head", 2.0, 8.0))
    rows = [
        ComparisonRow(**row | {"mode": mode, "tau": tau, "speedup_hf": over})
        for mode, tau, over in ways
    ]
    figure = draw(rows, "a title")
    plt.close(figure)
    (axes,) = figure.axes
    widths = {
        label.get_text(): bar.get_width()
        for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
    }
    assert widths == {"plain decoding": 5.0, "model.generate": 1.0, "head": 8.0}
    assert "times as fast as transformers' model.generate" in axes.get_xlabel()


def test_an_answer_that_had_to_be_recorded_for_is_timed_again(monkeypatch) -> None:
    class Compiling(Contestant):
        def decode(
            self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
        ) -> RacedAnswers:
            seeds.append(seed)
            if len(seeds) == 2:  # the first is the warm-up
                monkeypatch.setattr(Recorded, "made", Recorded.made + 1)
            return RacedAnswers([[1, 2]], 1, float(len(seeds)), 0.0)

    seeds: list[int] = []
    contestant = Compiling("ours", "none", SamplingConfig())
    prepare(contestant, [[1]], 8, seed=5)
    (record,) = race([contestant], [[[1]]], 2, 8, seed=5)
    assert seeds == [5, 5, 5, 6]
    assert [answers[0].decode_seconds for answers in record.answers] == [3.0, 4.0]
