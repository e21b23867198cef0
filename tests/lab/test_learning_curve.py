"""What more answers would bring, from the learning curve of one run."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import run

from drafthead.lab.learning_curve import LearningCurve, Point, what_more_would_bring
from drafthead.scripts import options
from drafthead.scripts.building.stages import forget_accelerate
from drafthead.scripts.data import distill
from drafthead.train.run.starting_config import write_starting_config

ASSETS = Path(__file__).parents[2] / "assets"
TARGET, PROMPTS = str(ASSETS / "demo_target"), ASSETS / "demo_prompts"


def curve_of(function, best: float | None = None) -> LearningCurve:
    points = [Point(n, function(n)) for n in (100, 200, 400, 800)]
    return LearningCurve(points, points[-1].tau, best or points[-1].tau, 1.0)


@pytest.mark.parametrize("bend", [-0.5, 0.0, 0.3, 0.8])
def test_the_interval_holds_what_a_curve_goes_on_to(bend: float) -> None:
    def tau(n: float) -> float:
        return 1.5 + 0.2 * (np.log(n / 100) if bend == 0 else (1 - (n / 100) ** -bend) / bend)

    for times in (2, 4):
        found = curve_of(tau).forecast(times)
        assert found.low - 0.01 <= tau(800 * times) <= found.high + 0.01
        assert found.answers == 800 * times


def test_a_flat_curve_promises_little_and_a_forecast_begins_at_the_runs_own_tau() -> None:
    flat = curve_of(lambda n: 2.0, best=2.3).forecast(2)
    assert 2.3 <= flat.low <= flat.tau <= flat.high < 2.31


def write_run(folder: Path, taus: list[float]) -> None:
    epochs = [0.125, 0.25, 0.5, 1.0, 2.0, 3.0]
    lines = [
        {"step": n, "epochs": e, "answers": round(min(1, e) * 800), "tau_tree": {"16": tau}}
        for n, (e, tau) in enumerate(zip(epochs, taus, strict=False))
    ]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_runs_log_tells_of_training_that_was_too_long(tmp_path: Path) -> None:
    write_run(tmp_path, [1.2, 1.4, 1.6, 1.8, 2.2, 2.0])
    curve = LearningCurve.of_run(tmp_path)
    assert curve is not None
    assert curve.answers == 800
    first, more, too_long = what_more_would_bring(tmp_path, seconds_an_answer=3.6)
    assert first.startswith("tau at 16 nodes by answers read: 1.20 after 100, 1.40 after 200")
    assert more.startswith("800 more answers: tau 2.20 -> ")
    assert more.endswith("48 min here")
    assert "tau was 2.20 after 2.0 epochs" in too_long


def test_the_category_that_gains_most_is_named_first(tmp_path: Path) -> None:
    write_run(tmp_path, [1.2, 1.4, 1.6, 1.8, 2.2, 2.4])
    log = tmp_path / "evaluation.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [{"code": tau, "prose": 1.5} for tau in (1.2, 1.6, 2.0, 2.4, 2.8, 3.0)]
    lines = [line | {"categories": kind} for line, kind in zip(lines, kinds, strict=True)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    *_, last = what_more_would_bring(tmp_path)
    assert last.startswith("with twice the answers, by category: code 3.00 -> 3.")
    assert "prose 1.50 -> 1.5" in last


def test_a_short_run_has_no_curve(tmp_path: Path) -> None:
    assert LearningCurve.of_run(tmp_path) is None
    write_run(tmp_path, [1.2, 1.4])
    assert LearningCurve.of_run(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("of", ["parallel", "medusa"])
def test_what_a_run_foretells_comes_true_with_more_answers(tmp_path: Path, of: str) -> None:
    """On the small model: heads of 150, 300 and 600 answers, each read twice."""
    answers, held_out = tmp_path / "answers.jsonl", tmp_path / "held_out.jsonl"
    model, settings = options.Model(target=TARGET), {"max_new_tokens": 64, "batch_size": 64}
    for name, output, limit in (("train", answers, 600), ("validation", held_out, 100)):
        distill.main(
            model=model,
            asked=distill.Asked(prompts=str(PROMPTS / f"{name}.jsonl"), limit=limit),
            answered=distill.Answered(**settings),
            where=distill.Where(output=str(output)),
        )
    rows = answers.read_text().splitlines(keepends=True)
    config = tmp_path / "train.yaml"
    write_starting_config(of, TARGET, config)
    curves: list[LearningCurve] = []
    for number in (150, 300, 600):
        some, head = tmp_path / f"{number}.jsonl", tmp_path / f"head{number}"
        some.write_text("".join(rows[::2][:number] if number < 600 else rows))
        forget_accelerate()
        run(
            config, f"data.train={some}", f"data.validation={held_out}", f"train.output={head}",
            "data.validation_share=null", "train.epochs=2", "train.batch_rows=2",
            "train.micro_batch_rows=2",
        )  # fmt: skip
        curve = LearningCurve.of_run(head)
        assert curve is not None
        print(number, curve.points, curve.best, curve.forecast(2), curve.forecast(4))
        curves.append(curve)
    within = 0
    for small, large, times in ((0, 1, 2), (1, 2, 2), (0, 2, 4)):
        found = curves[small].forecast(times)
        within += found.low <= curves[large].best <= found.high
    assert within >= 2
