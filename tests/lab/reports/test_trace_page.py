"""The picture of a trace: its text, its marks, and a page that needs nothing else."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny import target_folder
from typer import Typer
from typer.testing import CliRunner

from drafthead.infer import Decoder
from drafthead.lab.reports.trace_page import as_page, spans
from drafthead.lab.tracing import Trace
from drafthead.lab.tracing import trace as trace_of
from drafthead.scripts.explain import trace_decoding
from drafthead.scripts.options import with_groups

pytestmark = pytest.mark.usefixtures("steady_steps")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


folder = target_folder(max_position_embeddings=512, initializer_range=0.02)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder, draft="lookup", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def trace(decoder: Decoder, steady_steps: None) -> Trace:
    trace = trace_of(decoder, "<b>&amp;</script>", max_new_tokens=40)
    assert trace.result.stats.tau > 1
    return trace


def test_the_spans_that_were_not_rejected_are_the_answer(decoder: Decoder, trace: Trace) -> None:
    found = list(spans(trace, decoder.tokenizer))
    assert "".join(s.text for s in found if s.kind != "rejected") == trace.result.texts[0]
    drafted = [span for span in found if span.kind == "drafted"]
    accepted = sum(len(step.path) - 1 for step in trace.steps)
    assert accepted - 4 <= len(drafted) <= accepted  # the limit may cut the last step
    for span in found:
        if span.node is not None:
            node = trace.steps[span.step].nodes[span.node]
            assert node.accepted == (span.kind == "drafted")


def test_the_page_holds_the_trace_and_asks_for_nothing_else(decoder: Decoder, trace: Trace) -> None:
    page = as_page(trace, decoder.tokenizer, {"target": "<i>tiny</i>"})
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    shown = json.loads(data[1])
    assert shown["prompt"] == decoder.tokenizer.decode(trace.prompt)
    assert len(shown["steps"]) == len(trace.steps)
    assert shown["about"] == {"target": "<i>tiny</i>"}
    assert "</script>" not in data[1] and "<i>" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import|url\(", page)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_every_step_and_the_tree_of_the_longest(
    decoder: Decoder, trace: Trace, tmp_path: Path
) -> None:
    page = tmp_path / "trace.html"
    page.write_text(as_page(trace, decoder.tokenizer, {}), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(page)]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert drawn.count("<button") == len(trace.steps)
    longest = max(trace.steps, key=lambda step: len(step.path))
    assert drawn.count("<rect") == len(longest.nodes) + 1  # and the target's own token
    assert drawn.count('<g class="accepted"') == len(longest.path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_what_was_rejected_is_hidden_until_its_step_is_chosen(
    decoder: Decoder, trace: Trace, tmp_path: Path
) -> None:
    """A script at the end of the page writes what a reader sees, before and after a choice."""
    rejected = [span for span in spans(trace, decoder.tokenizer) if span.kind == "rejected"]
    assert rejected
    of_one = [span.text for span in rejected if span.step == rejected[0].step]
    script = """<script>const seen = () => [...document.querySelectorAll(".rejected")].filter(
        node => node.parentNode.id === "text" && getComputedStyle(node).display !== "none").length;
        document.title = "seen " + seen(); choose(STEP); document.title += " then " + seen();
        </script>""".replace("STEP", str(rejected[0].step))
    page = tmp_path / "trace.html"
    page.write_text(as_page(trace, decoder.tokenizer, {}).replace("</body>", f"{script}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(page)]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert f"<title>seen 0 then {len(of_one)}</title>" in drawn


def test_the_verb_writes_a_page(folder: Path, tmp_path: Path) -> None:
    app = Typer()
    app.command()(with_groups(trace_decoding.main))
    options = ["--target", folder, "--draft", "lookup", "--prompt", "hello", "--max-new-tokens", 20]
    page = tmp_path / "pages" / "trace.html"

    def run(*more: object) -> str:
        result = CliRunner().invoke(app, [str(part) for part in (*options, *more)])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert f"{page} is written" in run("--output", page)
    assert page.read_text().startswith("<!doctype html>")
