"""benchmarks/gpu.py on a CPU: what fails here would cost minutes of a borrowed GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu import LEAST_LEFT, Bench, phase

ROOT = Path(__file__).parent.parent
PHASES = (
    "facts", "kernels", "large", "small", "rows", "long_texts", "options", "real", "recorded",
    "static", "real_static", "tests", "build",
)  # fmt: skip


def test_every_phase_runs_and_writes_its_figures(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "benchmarks/gpu.py", "--rehearse", "--output", str(tmp_path)),
        *("--target", "assets/demo_target", "--prompts", "assets/demo_prompts/test.jsonl"),
        *("--deadline", "600"),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    files = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PHASES}
    for name, found in files.items():
        assert {"device", "seconds"} < found.keys(), name
        assert "failed" not in json.dumps(found), name
    steps = files["small"]["SmolLM2 eagle3 N=16"]
    assert steps["step_ms"] > 0 and steps["first_call_s"] > steps["first_call_first_token_s"] > 0
    draft, step = steps["graphs"].items()  # in the order in which a step replays them
    assert "grow" in draft[0] and "_step" in step[0] and draft[1]["ms"] > 0 < step[1]["ms"]
    assert files["build"]["build"]["exit"] == 0  # of its plan, which writes nothing
    assert files["real"]["lookup, planned"]["answers unlike plain"] == 0
    assert files["real"]["plain, 16 nodes wide"]["nodes"] == 8
    assert files["real"]["lookup, planned"]["answers unlike 16 nodes wide"] == 0


def test_what_time_is_left_for_is_measured_and_the_rest_is_named(tmp_path: Path) -> None:
    ends_at = time.perf_counter() + LEAST_LEFT + 60
    bench = Bench(torch.device("cpu"), tmp_path, True, ends_at, target="", head=None, prompts="")
    with phase(bench, "facts"):
        bench.measure("first", lambda: 1)
        bench.ends_at -= 60
        bench.measure("second", lambda: 2)
    found = json.loads((tmp_path / "facts.json").read_text())
    assert found["first"] == 1 and found["ended before"] == "second"
