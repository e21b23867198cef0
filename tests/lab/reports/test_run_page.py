"""One page of a run and of what was measured of its head."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from typer import Typer
from typer.testing import CliRunner

from drafthead.core.errors import UserError
from drafthead.lab.races.comparison import ComparisonRow
from drafthead.lab.reports.comparison import fastest, headline, named
from drafthead.lab.reports.run_page import Section, curve, doctor_section, run_page
from drafthead.scripts.explain import report

MACHINE = {"processor": "<b>fast</b>", "threads": 2}
ROW = {
    "mode": "plain", "drafter": "none", "verifier": "greedy", "tree_nodes": 1.0, "temperature": 0.0,
    "tokens": 10, "seconds": 1.0, "tokens_per_second": 10.0, "prefill_seconds": 0.1, "tau": 1.0,
    "acceptance_by_depth": [], "accept_length_counts": {"1": 10}, "draft_cost": None, "steps": 10,
    "phase_seconds": {}, "speedup": 1.0, "speedup_range": [1.0, 1.0], "speedup_hf": 4.0,
    "speedup_hf_range": [4.0, 4.0], "speedup_bound": None, "efficiency": None,
    "repeated_8gram_share": 0.0, "answers_ended": 1.0,
    "peak_memory_bytes": 0,
    "categories": {name: {"prompts": 1, "tokens_per_second": 9.0, "speedup": 1.0, "tau": 1.0}
                   for name in ("qa", "math")},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of four steps with one evaluation, a race, findings and a trace."""
    run = tmp_path / "run"
    run.mkdir()
    settings = {
        "target": {"name": "<script>alert(1)</script>"},
        "head": {"family": "medusa"},
        "data": {"train": "answers.jsonl"},
    }
    record = {"settings": settings, "versions": {"torch": "2"}, "finished": True}
    (run / "run.json").write_text(json.dumps(record))
    steps = [
        {
            "step": n, "supervised_tokens": 100 * n, "seconds": 60.0 * n, "loss": 4 - n,
            "right_in_a_row": 0.0,
            "supervised_tokens_per_s": 2.0, "target_share": 0.5,
        }
        for n in range(1, 5)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    evaluation = {"step": 4, "anchors": 77, "tau_chain": 1.5, "alpha": [0.61, 0.25]}
    evaluation["tau_tree"] = {"8": 1.75, "16": 1.875}
    (run / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")
    race = tmp_path / "race"
    race.mkdir()
    about = {"machine": MACHINE, "dtype": "float32", "prompts": 3, "notes": ["all equal"]}
    (race / "comparison.json").write_text(json.dumps({**about, "rows": [ROW]}))
    (race / "comparison.png").write_bytes(b"a picture")
    findings = {"loops": {"evidence": "41 %", "remedy": "again"}, "fine": {"evidence": "0 %"}}
    (tmp_path / "doctor.json").write_text(json.dumps({"findings": findings}))
    (tmp_path / "trace.html").write_text('<p class="x">an "answer"</p>')
    return tmp_path


def written(*arguments: str) -> tuple[int, str]:
    """Exit status and error of the verb."""
    app = Typer()
    app.command()(report.main)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, str(result.exception or result.output)


def test_a_page_has_all_that_it_was_given_and_asks_for_nothing_else(folder: Path) -> None:
    status, printed = written(
        str(folder / "run"), "--comparison", str(folder / "race"), "--output",
        str(folder / "new" / "page.html"), "--doctor", str(folder / "doctor.json"),
        "--trace", str(folder / "trace.html"),
    )  # fmt: skip
    assert status == 0, printed
    page = (folder / "new" / "page.html").read_text()
    for shown in ("400 tokens in 4 minutes", "1.88", "0.61", "41 %", "again", "all equal", "math"):
        assert shown in page, shown
    assert base64.b64encode(b"a picture").decode() in page
    assert 'srcdoc="&lt;p class=' in page
    assert "<script" not in page and "<b>" not in page
    assert not re.search(r"https?://|@import|url\(|src=\"(?!data:)", page)
    assert page.index("loops") < page.index("fine"), "faults come first"


def test_the_headline_is_the_fastest_of_our_ways() -> None:
    plain = TypeAdapter(ComparisonRow).validate_python(ROW)
    theirs = replace(plain, mode="generate + assistant", tau=None, speedup_hf=9.0)
    head = replace(plain, mode="head mine", speedup=1.5, speedup_hf=6.0, tokens_per_second=15.0)

    def said(*rows: ComparisonRow) -> str:
        return headline(fastest(rows), 8, named)

    assert said(plain, theirs, head) == (
        "head mine is fastest (8 prompts): 15 tokens/s at temperature 0, 6.00 times model.generate "
        "and 1.50 times plain decoding"
    )
    sure = said(plain, replace(head, speedup_interval=(1.4, 1.61)))
    assert sure.endswith("1.50 (1.40 to 1.61) times plain decoding")
    assert said(plain, theirs) == (
        "plain decoding is fastest (8 prompts): 10 tokens/s at temperature 0, 4.00 times "
        "model.generate"
    )
    assert "temperature 0 (lossy: typical), " in said(replace(head, verifier="typical"))
    page = run_page("a", [], [Section("b"), Section("c", headline="<fast>")])
    assert page.index("&lt;fast&gt;") < page.index("<h2>b")


@pytest.mark.parametrize(
    ("lookup", "table", "plain", "equal"),
    [
        ((1.36, 1.12, 1.51), (1.34, 1.10, 1.50), 1.0, ["lookup", "n-grams"]),
        ((1.36, 1.35, 1.37), (1.34, 1.10, 1.50), 1.0, ["lookup"]),
        ((1.36, 1.12, 1.51), (1.20, 1.10, 1.30), 1.0, ["lookup"]),
        ((1.05, 0.95, 1.11), (0.80, 0.70, 0.90), 1.0, ["lookup", "plain"]),
    ],
)
def test_what_prompts_do_not_tell_apart_is_equally_fast(lookup, table, plain, equal) -> None:
    row = TypeAdapter(ComparisonRow).validate_python(ROW)
    rows = [replace(row, speedup_hf=plain)]
    for mode, (speedup, low, high) in (("lookup", lookup), ("n-grams", table)):
        interval = {"speedup_interval": (low, high), "speedup_hf": speedup}
        rows.append(replace(row, mode=mode, speedup=speedup, **interval))
    found = fastest(rows)
    assert [each.mode for each in found] == equal
    words = " and ".join(map(named, equal))
    are = "are equally fast here" if len(equal) > 1 else "is fastest"
    assert headline(found, 8, named).startswith(f"{words} {are} (8 prompts): ")


def test_ways_are_equally_fast_at_one_temperature_alone() -> None:
    row = TypeAdapter(ComparisonRow).validate_python(ROW)
    fast = replace(row, mode="lookup", speedup=1.4, speedup_interval=(1.2, 1.6), speedup_hf=2.0)
    warm = replace(fast, temperature=0.7, speedup_hf=1.9)
    assert fastest([fast, warm]) == [fast] and fastest([warm, fast]) == [fast]


def test_a_run_alone_makes_a_page(folder: Path) -> None:
    (folder / "run" / "evaluation.jsonl").unlink()
    assert written(str(folder / "run"), "--output", str(folder / "page.html"))[0] == 0
    page = (folder / "page.html").read_text()
    assert "held-out" not in page and "data:image/png" in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["@/run", "--output", "@/page.pdf"], "must end in .html"),
        (["@/gone", "--output", "@/page.html"], "does not exist"),
        (["@/run", "--comparison", "@/run", "--output", "@/page.html"], "does not exist"),
        (["@/run", "--trace", "@/gone.html", "--output", "@/page.html"], "cannot read the trace"),
    ],
)
def test_what_is_not_there_is_said(folder: Path, arguments: list[str], sentence: str) -> None:
    status, printed = written(*(a.replace("@", str(folder)) for a in arguments))
    assert status != 0 and sentence in printed
    assert not (folder / "page.html").exists()


def test_other_files_are_not_taken_for_findings(folder: Path) -> None:
    with pytest.raises(UserError, match="is not what `drafthead head doctor --output` writes"):
        doctor_section(folder / "run" / "run.json")


def test_many_steps_become_few_points() -> None:
    steps = [{"supervised_tokens": n, "loss": -n} for n in range(1, 101)]
    tokens, losses = curve(steps, "loss")
    assert (tokens[:2], losses[:2], len(tokens)) == ([1.5, 3.5], [-1.5, -3.5], 50)


def test_text_is_escaped() -> None:
    page = run_page("<i>", [("<u>", "&")], [Section("<s>", notes=["<q>"])])
    assert not {"<i>", "<u>", "<s>", "<q>"} & {*re.findall("<.>", page)}
